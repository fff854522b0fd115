"""Rows of the store: written with a checksum, and refused when it does not match."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import msgspec

from shoal.core.state.state import Snapshot
from shoal.model.events import Event, JobEvent, NodeEvent
from shoal.model.job import Job

encode = msgspec.json.Encoder().encode
_event: Callable[[bytes], Event] = msgspec.json.Decoder(Event).decode
_job = msgspec.json.Decoder(Job).decode
_snapshot = msgspec.json.Decoder(Snapshot).decode


class Unreadable(Exception):
    """A row is not what was written; the message says what is wrong."""


EventRow = tuple[int, str | None, str | None, bytes, int, str]
JobRow = tuple[int, str, str | None, bytes, int, str]


def checksum(number: int, body: bytes) -> int:
    """It covers the row's number, so that a body in another row does not match either."""
    return zlib.crc32(body, (number ^ number >> 32) & 0xFFFFFFFF)


def event_row(seq: int, event: Event) -> EventRow:
    body = encode(event)
    job = event.job if isinstance(event, JobEvent) else None
    node = event.node if isinstance(event, NodeEvent) else None
    return seq, job, node, body, checksum(seq, body), type(event).__name__


def job_row(job: Job) -> JobRow:
    body = encode(job)
    key, crc = job.key or None, checksum(job.number, body)
    return job.number, job.id, key, body, crc, job.spec.tenant


def event_of(seq: int, body: bytes, crc: int | None) -> Event:
    _verify(seq, body, crc)
    try:
        return _event(body)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
        raise Unreadable(str(error)) from None


def job_of(number: int, body: bytes, crc: int | None) -> Job:
    _verify(number, body, crc)
    try:
        return _job(body)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
        raise Unreadable(str(error)) from None


def snapshot_of(seq: int, body: bytes, crc: int | None) -> Snapshot:
    _verify(seq, body, crc)
    try:
        return _snapshot(body)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
        raise Unreadable(str(error)) from None


def _verify(number: int, body: bytes, crc: int | None) -> None:
    """Rows of the first format have no checksum: they count if they can be decoded."""
    if not isinstance(body, bytes):
        raise Unreadable("it is no row of ours")
    if crc is not None and crc != checksum(number, body):
        raise Unreadable("its checksum does not match")
