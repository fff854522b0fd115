"""Asking a replica over HTTP: one GET, its status, and as much of its body as is wanted."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import NamedTuple

import msgspec

from shoal.link.http import connect, request_head

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
