"""Where a gang meets and a replica answers: ports that nobody can know before they are given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain
from itertools import count as counted

from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.array import ELEMENT_NUMBERS
from shoal.model.ids import in_order
from shoal.model.job import Job
from shoal.model.resources import Slice

DRAWS_MAX = 64  # of a nearly full range; then the first free port is looked for
# Between the ports of two jobs that are alone, and of two attempts of one. Elements of an array are
# next to each other.
APART, AGAIN = 101, 4_999


def meeting_points(round_: Round, job: Job, given: tuple[Slice, ...]) -> tuple[str, str]:
    """Its rendezvous point, and where it answers if that is elsewhere. A job that is alone and
    answers nobody gets neither."""
    gang = len(given) > 1 or job.spec.elastic
    if not gang and not job.spec.service:
        return "", ""
    free = _free(round_, job, given[0].node)
    return next(free), next(free) if job.spec.service and len(given) > 1 else ""


def lone_point(state: State, job: Job) -> tuple[str, int]:
    """Where torchrun in a job that is alone meets its own processes. Nothing is kept of it, so it
    costs nothing if the job is not torchrun. Jobs that run at the same time have numbers that are
    near each other, so they do not collide."""
    policy, number, index = state.policy, job.number // ELEMENT_NUMBERS, -1
    if job.spec.array:
        number, index = in_order(job.id)
    offset = APART * number + index + AGAIN * job.attempt
    address = state.nodes[job.members[0].slice.node].spec.address
    return address, policy.port_first + offset % policy.port_count


def _free(round_: Round, job: Job, node: str) -> Iterator[str]:
    """Points that no live job uses. They are drawn with a seed from outside, which is different in
    every step: whoever has seen all ports so far does not know the next. The node sees whether
    another process has the port; then the job gets another."""
    state, first, count = round_.state, round_.policy.port_first, round_.policy.port_count
    address, key = state.nodes[node].spec.address, round_.port_seed.to_bytes(16, "little")
    seen = set[str]()
    for port in chain(_draws(job, key, first, count), range(first, first + count)):
        if (point := f"{address}:{port}") not in state.masters and point not in seen:
            seen.add(point)
            yield point
    for more in counted():  # all are in use: the node refuses it, and its next attempt may find one
        yield f"{address}:{first + (job.number + more) % count}"


def _draws(job: Job, key: bytes, first: int, count: int) -> Iterator[int]:
    for draw in range(DRAWS_MAX):
        about = f"{job.id} {job.attempt} {draw}".encode()
        number = int.from_bytes(hashlib.blake2b(about, digest_size=8, key=key).digest(), "little")
        yield first + number % count
