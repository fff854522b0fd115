"""Asking a replica over HTTP: one GET, its status, and as much of its body as is wanted."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import NamedTuple

import msgspec

HEAD_BYTES_MAX = 64 * 1024
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
    except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return NO_ANSWER
    finally:
        asked.cancel()


async def _get(host: str, port: int, path: str, body_max: int) -> Answer:
    reader, writer = await asyncio.open_connection(host, port, limit=HEAD_BYTES_MAX)
    try:
        name = f"[{host}]" if ":" in host else host
        request = f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        await writer.drain()
        line = await reader.readuntil(b"\n")
        status = int(line.split()[1])
        if not body_max:
            return Answer(status)
        headers = await _headers(reader)
        if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            return Answer(status, await _chunks(reader, body_max))
        length = int(headers.get(b"content-length", body_max))
        return Answer(status, await _up_to(reader, min(length, body_max)))
    except IndexError:
        raise ValueError("no status line") from None
    finally:
        writer.close()


async def _headers(reader: asyncio.StreamReader) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    read = 0
    while line := (await reader.readuntil(b"\n")).strip():
        name, _, value = line.partition(b":")
        found[name.strip().lower()] = value.strip()
        read += len(line)
        if read > HEAD_BYTES_MAX:
            raise ValueError("its headers do not end")
    return found


async def _chunks(reader: asyncio.StreamReader, body_max: int) -> bytes:
    body = b""
    while len(body) < body_max:
        size = int((await reader.readuntil(b"\n")).split(b";")[0], 16)
        if size <= 0:
            break
        body += await _up_to(reader, min(size, body_max - len(body)))
        await reader.readuntil(b"\n")
    return body


async def _up_to(reader: asyncio.StreamReader, length: int) -> bytes:
    """So many bytes, or those until the end."""
    parts = []
    while length > 0 and (part := await reader.read(min(length, 65_536))):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
