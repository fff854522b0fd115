"""Asks replicas over HTTP: one GET, its status, and as much of its body as is wanted. Reads the
figures of the engines inside them: rarely, a bounded amount, and beside the loop.

Only services that follow the load, or that say they are like OpenAI's, are asked: /metrics of any
other server is its own business.
"""

from __future__ import annotations

import asyncio
import errno
import math
import re
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from shoal.core.state.state import State
from shoal.link.http import connect, request_head
from shoal.model.job import Job, Phase
from shoal.model.service import EngineFigures, Service

TICK_S = 0.1
LATE_S = 0.5  # if this process was held up this long, it may have read an answer too late
# Errors on this side of a connection say nothing about the other side.
OUR_OWN_ERRORS = frozenset(
    (
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EADDRNOTAVAIL,
        errno.ENETUNREACH,
        errno.ENETDOWN,
        errno.EHOSTUNREACH,
    )
)


class Answer(NamedTuple):
    """`status` is 0 if there was no answer."""

    status: int
    body: bytes = b""


NO_ANSWER = Answer(0)


class Model(msgspec.Struct):
    id: str = ""


class Models(msgspec.Struct):
    """OpenAI's list of models, as far as it matters here."""

    data: list[Model] = []


def lists_a_model(answer: Answer) -> bool:
    """Whether an answer to /v1/models names a model. A server that wants a key is up, but does not
    say what it has."""
    if answer.status in (401, 403):
        return True
    if answer.status != 200:
        return False
    try:
        return any(model.id for model in msgspec.json.decode(answer.body, type=Models).data)
    except msgspec.DecodeError:
        return False


async def get(door: str, path: str, timeout_s: float, body_max: int = 0) -> Answer | None:
    """`door`: address:port. None if it is not known whether it answers, because this process could
    not ask or was itself too late to read the answer. Of the body at most `body_max` is read."""
    host, _, port = door.rpartition(":")
    asked = asyncio.create_task(_get(host, int(port), path, body_max))
    end_s, late_s = time.monotonic() + timeout_s, 0.0
    try:
        while not asked.done() and (now_s := time.monotonic()) < end_s:
            tick_s = min(TICK_S, end_s - now_s)
            await asyncio.wait({asked}, timeout=tick_s)
            late_s = max(late_s, time.monotonic() - now_s - tick_s)
        if not asked.done():
            return None if late_s > LATE_S else NO_ANSWER
        return asked.result()
    except OSError as error:
        return None if error.errno in OUR_OWN_ERRORS else NO_ANSWER
    finally:
        asked.cancel()


async def _get(host: str, port: int, path: str, body_max: int) -> Answer:
    line = await connect(host, port)
    try:
        name = f"[{host}]" if ":" in host else host
        headers = [(b"Host", f"{name}:{port}".encode()), (b"Connection", b"close")]
        line.begin(request_head("GET", path.encode(), headers))
        if not body_max:
            return Answer(await line.status())
        status, _ = await line.head()
        body = b""
        while len(body) < body_max and (piece := await line.piece()):
            body += piece
        return Answer(status, body[:body_max])
    finally:
        line.abort()


PATH = "/metrics"
EVERY_S = 5.0
# A server that shows no such figures is asked again after this long, then after twice as long, up
# to the second number: each time is a line in its log.
NONE_EVERY_S, NONE_EVERY_S_MAX = 60.0, 3_600.0
TIMEOUT_S = 2.0
OLD_S = 3 * EVERY_S  # figures that are older say nothing
BYTES_MAX = 2 << 20  # vLLM shows about 100 KiB
READS_MAX = 64  # at once


class Reading(msgspec.Struct):
    attempt: int
    due_s: float = 0.0
    seen_s: float = 0.0
    figures: EngineFigures | None = None
    pause_s: float = NONE_EVERY_S


class EngineReader:
    def __init__(self, door: Callable[[State, Job], str]) -> None:
        self._door = door
        self._readings: dict[str, Reading] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def look(self, state: State) -> None:
        """Ask those that are due; each in a task of its own."""
        now_s = time.monotonic()
        for job_id in [one for one, task in self._under_way.items() if task.done()]:
            del self._under_way[job_id]
        serving = [job for service in state.services.values() for job in _asked(state, service)]
        known = {job.id for job in serving}
        self._readings = {j: one for j, one in self._readings.items() if j in known}
        for job in serving:
            reading = self._readings.get(job.id)
            if reading is None or reading.attempt != job.attempt:
                reading = self._readings[job.id] = Reading(job.attempt)
            if reading.due_s > now_s or job.id in self._under_way:
                continue
            if len(self._under_way) >= READS_MAX:
                return
            work = self._read(reading, self._door(state, job))
            self._under_way[job.id] = asyncio.create_task(work)

    def figures(self, job_ids: Iterable[str]) -> dict[str, EngineFigures]:
        fresh_s = time.monotonic() - OLD_S
        return {
            job_id: reading.figures
            for job_id in job_ids
            if (reading := self._readings.get(job_id)) is not None
            and reading.figures is not None
            and reading.seen_s >= fresh_s
        }

    async def _read(self, reading: Reading, door: str) -> None:
        reading.due_s = time.monotonic() + EVERY_S
        answer = await get(door, PATH, TIMEOUT_S, BYTES_MAX)
        if answer is None or not answer.status:
            return
        text = answer.body.decode(errors="replace") if answer.status == 200 else ""
        # A long text takes milliseconds, which the loop should not have to wait for.
        reading.figures = await asyncio.to_thread(engine_figures, text)
        reading.seen_s = time.monotonic()
        if reading.figures is None:
            reading.due_s = reading.seen_s + reading.pause_s
            reading.pause_s = min(2 * reading.pause_s, NONE_EVERY_S_MAX)
        else:
            reading.pause_s = NONE_EVERY_S


def _asked(state: State, service: Service) -> list[Job]:
    spec = service.spec
    if spec.scale.least == spec.scale.most and not spec.probe.models:
        return []
    jobs = [state.jobs[job_id] for job_id in service.ready if job_id not in service.draining]
    return [job for job in jobs if job.phase is Phase.RUNNING]


# What an inference engine says of its own queue and cache, read from its Prometheus text.
#
# vLLM, SGLang and llama.cpp have the same figures under different names. An engine with several
# schedulers (data parallel) shows each of them once; ranks of one scheduler (tensor or pipeline
# parallel) repeat the same figure.


# In the order of preference: vLLM renamed its cache figure, and showed both for a while.
RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
)
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
CACHE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
RANKS = frozenset(("tp_rank", "pp_rank", "moe_ep_rank", "attn_tp_rank"))
LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
COUNT_MAX = 1_000_000


def engine_figures(text: str) -> EngineFigures | None:
    """None if the text has no figures of an engine that is known."""
    wanted = frozenset((*RUNNING, *WAITING, *CACHE))
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for line in text.splitlines():
        if not line.startswith(("vllm:", "sglang:", "llamacpp:")):
            continue
        parsed = LINE.match(line)
        if parsed is None or parsed[1] not in wanted:
            continue
        value = _number(parsed[3])
        if value is None:
            continue
        labels = LABEL.findall(parsed[2] or "")
        scheduler = tuple(sorted(label for label in labels if label[0] not in RANKS))
        of_name = found.setdefault(parsed[1], {})
        of_name[scheduler] = max(value, of_name.get(scheduler, 0.0))
    waiting, running, cache = (_first(found, names) for names in (WAITING, RUNNING, CACHE))
    if waiting is None:
        return None
    return EngineFigures(
        waiting=_count(waiting),
        running=_count(running or []),
        cache_milli=min(1000, round(1000 * sum(cache) / len(cache))) if cache else 0,
    )


def _first(
    found: dict[str, dict[tuple[tuple[str, str], ...], float]], names: tuple[str, ...]
) -> list[float] | None:
    return next((list(found[name].values()) for name in names if name in found), None)


def _count(values: list[float]) -> int:
    return min(COUNT_MAX, round(sum(values)))


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
