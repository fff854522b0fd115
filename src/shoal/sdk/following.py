"""Waits for the end of a job, and follows what its members write until then."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from shoal.client import Client
from shoal.model.views import JobView

PATIENCE_S = 60.0  # for a controller that restarts; after a minute it will not come back
LOOK_S = 20.0  # how long the controller waits for an end in one call; at most 30
WAIT_S = 10.0  # how long the controller waits for output in one call
TURN_S = 2.0  # how often to look for the next attempt
LINE_BYTES_MAX = 1 << 20  # a longer one comes in parts


def deadline_of(timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def ended(client: Client, job_id: str, deadline: float, look_s: float = LOOK_S) -> JobView | None:
    """The job if it has ended; None after `look_s`, TimeoutError after the deadline."""
    left_s = max(0.0, deadline - time.monotonic())
    patient = client.lent(patience_s=min(PATIENCE_S, left_s))
    view = patient.job(job_id, wait_for="finished", wait_s=min(look_s, left_s))
    if view.finished_ms is not None:
        return view
    if not left_s:
        raise TimeoutError(f"{job_id} is still {view.state}: {view.why}")
    return None


def line_groups(
    client: Client, job_id: str, member: int = 0, attempt: int = 0
) -> Iterator[list[str]]:
    """Lines without their ends, in groups as they arrive."""
    patient = client.lent(patience_s=PATIENCE_S)
    view = patient.job(job_id)
    if view.array is not None:
        patient.logs(job_id)  # refused, with the name of an element
    while not view.attempt and view.finished_ms is None:
        view = patient.job(job_id, wait_for="running", wait_s=WAIT_S)
    current = attempt or view.attempt
    while current:
        yield from _attempt(patient, job_id, member, current)
        view = patient.job(job_id)
        while view.attempt <= current:
            if view.finished_ms is not None:
                return
            view = patient.job(job_id, wait_for="finished", wait_s=TURN_S)
        current += 1


def _attempt(client: Client, job_id: str, member: int, attempt: int) -> Iterator[list[str]]:
    offset, begun, ended = 0, b"", False
    while not ended:
        view = client.logs(job_id, member=member, attempt=attempt, offset=offset, wait_s=WAIT_S)
        offset, ended = view.next_offset, view.ended
        *whole, begun = (begun + view.data).split(b"\n")
        if len(begun) > LINE_BYTES_MAX:
            whole, begun = [*whole, begun], b""
        if whole:
            yield [_text(line) for line in whole]
    if begun:
        yield [_text(begun)]


def _text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode(errors="replace")
