"""What the past costs: to keep the bars, and to go to a moment an hour ago in a busy cluster.

    python bench/past.py [EVENTS] [NODES]

The log is of a full cluster with a queue, in which about twelve events happen each second. It is
made event by event, because a scheduler would take most of the time. Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.figures import machine, percentile
from shoal.api.moment import Moments
from shoal.api.moment_reader import MomentAsk
from shoal.api.principal import THE_OPERATOR
from shoal.api.problems import Refusal
from shoal.api.timeline import fewer
from shoal.control.loop import EVENTS_PER_SNAPSHOT
from shoal.control.past.following import Bars
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.apply import apply
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeJoined, NodeReady
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import (
    JobFinished,
    JobPlaced,
    JobRunning,
    MemberExited,
    MembersStarted,
)
from shoal.core.state.state import State
from shoal.model.job import Job, JobSpec, Outcome, Phase
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.resources import Slice
from shoal.tick import Stage, Tick

EVENTS, NODES = 1_000_000, 200
GPUS = 8
WAITING = 1_000
ENDING = 25  # jobs that end in a turn, and as many begin
TURN_MS = 12_000
HOUR_MS, MONTH_MS = 3_600_000, 30 * 86_400_000
PIXELS = 1_200
SCRUBS = 30


class Log:
    """A cluster's log, made event by event without a scheduler, and stored with its snapshots."""

    def __init__(self, home: Path, nodes: int) -> None:
        self.store = SqliteStore(home / "shoal.db")
        self.state, self.now_ms = State(), 1_000_000
        self._tick = Tick(self.store, None, lambda *_: None)
        self._events: list[Event] = []
        self._ended: list[Job] = []
        self._dice = random.Random(5)
        self._running: list[Job] = []
        self._free = {f"n{number}": set(range(GPUS)) for number in range(nodes)}
        for name in self._free:
            spec = NodeSpec(id=name, cpu_milli=64_000, memory_mb=64_000, gpus=GPUS)
            self._add(NodeJoined(at_ms=self.now_ms, node=name, spec=spec, incarnation=1))
            self._add(NodeReady(at_ms=self.now_ms, node=name))
        for _ in range(WAITING):
            self._submit()
        while self._start():
            self._submit()
        self._commit()

    def turn(self) -> None:
        """Some jobs end, and as many begin."""
        self.now_ms += TURN_MS
        for job in self._dice.sample(self._running, min(ENDING, len(self._running))):
            self._end(job)
        while self._start():
            self._submit()
        self._commit()

    def _add(self, event: Event) -> None:
        apply(self.state, event)
        self._events.append(event)

    def _commit(self) -> None:
        last = self.store.commit(self._events, self._ended)
        self._events, self._ended = [], []
        if last - self.store.snapshot_seq >= EVENTS_PER_SNAPSHOT:
            self._tick.state, self._tick.last_seq = self.state, last
            self._tick.stage = Stage.READY
            self.store.snapshot(*self._tick.snapshot())

    def _submit(self) -> None:
        gpus = self._dice.choice((1, 1, 1, 2, 4, 8))
        spec = JobSpec(command=("python", "train.py"), gpus=gpus, name=f"run-{gpus}")
        self._add(JobSubmitted(at_ms=self.now_ms, job=f"j{self.state.next_job}", spec=spec))

    def _start(self) -> bool:
        """The first that waits, if it fits somewhere."""
        job = next(job for job in self.state.jobs.values() if job.phase is Phase.WAITING)
        fits = (name for name, free in self._free.items() if len(free) >= job.spec.gpus)
        node = next(fits, None)
        if node is None:
            return False
        gpus = tuple(sorted(self._free[node])[: job.spec.gpus])
        self._free[node] -= set(gpus)
        name, now_ms = job.id, self.now_ms
        slices = (Slice(node, gpus=gpus, cpu_milli=1000),)
        self._add(
            JobPlaced(at_ms=now_ms, job=name, attempt=1, slices=slices, master=name, why="fits")
        )
        self._add(MembersStarted(at_ms=now_ms, job=name, attempt=1, members=(0,)))
        self._add(JobRunning(at_ms=now_ms, job=name, attempt=1))
        self._running.append(job)
        return True

    def _end(self, job: Job) -> None:
        slice_ = job.members[0].slice
        at: dict[str, Any] = {"at_ms": self.now_ms, "job": job.id, "attempt": 1}
        self._add(MemberExited(**at, member=0, node=slice_.node, code=0))
        self._add(JobFinished(**at, outcome=Outcome.SUCCEEDED, code=0, why="every member exited 0"))
        self._ended.append(job)
        self._running.remove(job)
        self._free[slice_.node] |= set(slice_.gpus)


def make(home: Path, events: int, nodes: int) -> Log:
    log = Log(home, nodes)
    while log.store._last < events:
        log.turn()
    return log


async def kept(home: Path, made: Log) -> dict[str, Any]:
    """The follower's work for all of the log, and reading a month of it."""
    store, now_ms = made.store, made.now_ms
    loop: Any = SimpleNamespace(
        last_seq=store._last, now_ms=lambda: now_ms, tick=SimpleNamespace(state=made.state)
    )
    bars = Bars(home / "bars.db", store, loop, print)
    began, cpu = time.perf_counter(), time.process_time()
    while bars._place.seq < store._last:
        await bars._in_thread(bars._write)
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    from_ms, to_ms = max(0, now_ms - MONTH_MS), now_ms
    began = time.perf_counter()
    found, _, _ = await bars.shown(from_ms, to_ms)
    read_s = time.perf_counter() - began
    began = time.perf_counter()
    shown, left_out = fewer(found, (to_ms - from_ms) // PIXELS, to_ms)
    merge_s = time.perf_counter() - began
    began = time.perf_counter()
    hour = (await bars.shown(to_ms - HOUR_MS, to_ms))[0]
    hour_s = time.perf_counter() - began
    await bars.close()
    return {
        "follow_us_per_event": round(1e6 * cpu_s / store._last, 2),
        "follow_wall_s": round(wall_s, 1),
        "bars": len(found),
        "month_read_s": round(read_s, 2),
        "month_merge_s": round(merge_s, 2),
        "month_shown": len(shown),
        "month_left_out": left_out,
        "hour_bars": len(hour),
        "hour_read_ms": round(1000 * hour_s, 1),
    }


async def scrub(home: Path, now_ms: int) -> dict[str, Any]:
    """As the page does: through the process that reads the past."""
    moments = Moments(home)

    async def at(at_ms: int) -> tuple[float, int]:
        began = time.perf_counter()
        ask = MomentAsk(at_ms=at_ms, now_ms=now_ms, who=THE_OPERATOR, others=Policy().others)
        while True:
            try:
                body = await moments.ask(ask)
                break
            except Refusal as error:  # a busy machine needs several tries
                if error.status != 503:
                    raise
        return 1000 * (time.perf_counter() - began), len(body)

    first_ms, size = await at(now_ms - HOUR_MS)
    dice = random.Random(7)
    forward = [await at(now_ms - HOUR_MS + 60_000 * step) for step in range(1, SCRUBS + 1)]
    back = [await at(now_ms - HOUR_MS - 60_000 * step) for step in range(1, SCRUBS + 1)]
    oldest_ms = now_ms // 2
    anywhere = [await at(dice.randrange(oldest_ms, now_ms)) for _ in range(SCRUBS)]
    moments.end()
    return {
        "hour_ago_first_ms": round(first_ms),
        "answer_kb": round(size / 1000),
        **{
            f"{name}_{percent}_ms": round(percentile([ms for ms, _ in times], percent))
            for name, times in (("forward", forward), ("back", back), ("anywhere", anywhere))
            for percent in (50, 99)
        },
    }


def main(events: int = EVENTS, nodes: int = NODES) -> dict[str, Any]:
    home = Path(tempfile.mkdtemp(prefix="shoal-past-"))
    try:
        made = make(home, events, nodes)
        store = made.store
        snapshots = store.database.read("SELECT count(*), sum(length(body)) FROM snapshots")
        result = {
            "events": store._last,
            "nodes": nodes,
            "hours": round(made.now_ms / HOUR_MS, 1),
            "snapshots": snapshots[0][0],
            "snapshots_mb": round(snapshots[0][1] / 1e6, 1),
            **asyncio.run(kept(home, made)),
            **asyncio.run(scrub(home, made.now_ms)),
            "machine": machine(),
        }
        store.close()
        return result
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:]))))
