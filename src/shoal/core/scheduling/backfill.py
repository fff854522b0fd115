"""Reservations for blocked jobs, so that jobs behind them fill gaps without delaying them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from shoal.core.phases.round import Round
from shoal.core.scheduling.again import kept_from
from shoal.core.scheduling.ends import SAFE as SAFE
from shoal.core.scheduling.ends import last_starts
from shoal.core.scheduling.expect import left_ms, run_ms
from shoal.core.scheduling.fit import area_of, members_here
from shoal.core.scheduling.order import takes_turns
from shoal.core.state.queue import Gang, gang_of
from shoal.core.state.state import State
from shoal.model.events import JobReserved
from shoal.model.job import Job, Phase
from shoal.model.policy import Preempt

TYPICAL = 50  # percent of jobs done by then: gives the most likely time
# In a very large cluster the search for an opening covers this many nodes, plus one per member. It
# may miss the earliest opening, but it takes no longer than placing.
NODES_MAX = 1024
# At most this many jobs of one lane are tried for a gap.
GAP_TRIES_MAX = 10
# A reservation that failed is made again, but not at once: looking at every node takes time.
RENEW_AFTER_MS = 10_000


class Opening(NamedTuple):
    """The first moment at which a gang fits, if running jobs end as expected."""

    start_ms: int
    nodes: tuple[int, ...]


def reserve(round_: Round, job: Job) -> None:
    """Keep the reservation of a job at the front, make one, or replace one that failed. If the end
    of the running jobs is unknown, it only records since when the job is in front."""
    state, now_ms = round_.state, round_.now_ms
    held = state.reservations.get(job.id)
    if held is not None and held.start_ms is not None and now_ms < held.start_ms:
        ends = last_starts(state, job)
        if all(ends.get(index, held.start_ms) >= held.start_ms for index in held.nodes):
            return
    if now_ms - state.agenda.looked_ms.get(job.id, now_ms - RENEW_AFTER_MS) < RENEW_AFTER_MS:
        return
    state.agenda.looked_ms[job.id] = now_ms
    opening = first_opening(state, job, now_ms, TYPICAL)
    if opening is None:
        if held is None:
            _emit(round_, job, None, (), "first in line")
        return
    again_ms = now_ms + RENEW_AFTER_MS
    if held is not None and held.nodes == opening.nodes and opening.start_ms < again_ms:
        round_.look_again(again_ms)  # the jobs there are late; the reservation stays as it is
        return
    names = tuple(state.order[index].id for index in opening.nodes)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    round_.look_again(max(now_ms + 1, opening.start_ms))
    why = f"on {shown}, when the jobs there end"
    _emit(round_, job, opening.start_ms, names, why)


def _emit(round_: Round, job: Job, start_ms: int | None, nodes: tuple[str, ...], why: str) -> None:
    round_.emit(
        JobReserved(at_ms=round_.now_ms, job=job.id, start_ms=start_ms, nodes=nodes, why=why)
    )


def delayed_by(state: State, job: Job, ahead: Iterable[str], now_ms: int) -> tuple[str, ...]:
    """The jobs ahead whose reservations begin while this one would still be running. A job that
    saves its work and may be stopped for them delays none."""
    if state.policy.preempt is Preempt.RANK and takes_turns(job):
        return ()
    expected = run_ms(state, job, SAFE)
    end_ms = None if expected is None else now_ms + expected - job.attained_ms
    return tuple(
        other
        for other in ahead
        if (held := state.reservations.get(other)) is not None
        and held.start_ms is not None
        and (end_ms is None or end_ms > held.start_ms)
    )


def nodes_of(state: State, delayed: Iterable[str]) -> set[int]:
    """The nodes reserved for these jobs."""
    return {index for other in delayed for index in state.reservations[other].nodes}


def first_opening(state: State, job: Job, now_ms: int, percent: int) -> Opening | None:
    """Looks at every open node that the job may use: what it holds now, and when it will hold
    more."""
    gang, avoid = gang_of(job), kept_from(state, job, now_ms)
    ends = last_starts(state, job)
    if gang.bound:
        openings = [
            opening
            for nodes in _areas(state, gang, avoid)
            if (opening := _opening_among(state, nodes, gang, now_ms, percent, ends)) is not None
        ]
        return min(openings, default=None)
    everywhere = (
        node.index for node in state.order if node.schedulable and node.index not in avoid
    )
    looked_at = list(islice(everywhere, NODES_MAX + gang.members))
    return _opening_among(state, looked_at, gang, now_ms, percent, ends)


def _areas(state: State, gang: Gang, avoid: Collection[int]) -> list[list[int]]:
    """The open nodes of each area that the gang could stay within."""
    groups: dict[str, list[int]] = {}
    for node in state.order:
        if node.schedulable and node.index not in avoid:
            groups.setdefault(area_of(state, node, gang), []).append(node.index)
    return list(groups.values())


def _opening_among(
    state: State,
    nodes: list[int],
    gang: Gang,
    now_ms: int,
    percent: int,
    ends: Mapping[int, int],
) -> Opening | None:
    """`ends`: the last moment at which the gang may start on a node."""
    gains: list[tuple[int, int, int]] = []  # (when, node, members more)
    for index in nodes:
        gains.extend(_gains(state, index, gang, now_ms, percent))
    gains.sort()
    room, chosen = 0, dict[int, int]()
    for when_ms, index, more in gains:
        if ends:  # the gang would start now, so that nodes that end soon do not count any more
            for late in [node for node in chosen if ends.get(node, when_ms) < when_ms]:
                room -= chosen.pop(late)
            if ends.get(index, when_ms) < when_ms:
                continue
        room += more
        chosen[index] = chosen.get(index, 0) + more
        if room >= gang.members:
            return Opening(when_ms, tuple(sorted(chosen)))
    return None


def _gains(
    state: State, index: int, gang: Gang, now_ms: int, percent: int
) -> list[tuple[int, int, int]]:
    """When the node gets room for more members of the gang as its jobs end, and for how many."""
    room = state.rooms[index]
    if not gang.demand.suits(room.kind):
        return []
    holds = members_here(gang, room.kind, room.level)
    gains = [(now_ms, index, holds)] if holds else []
    if holds >= gang.members:
        return gains
    future = room.copy()
    for end_ms, job, number in _ends(state, index, now_ms, percent):
        held, lent = job.members[number].held, job.members[number].lent
        future.change(held, +1, exclusive=job.spec.whole_nodes and not lent, asleep=lent)
        now_holds = members_here(gang, room.kind, future.level)
        if now_holds > holds:
            gains.append((end_ms, index, now_holds - holds))
            holds = now_holds
    return gains


def _ends(state: State, index: int, now_ms: int, percent: int) -> list[tuple[int, Job, int]]:
    found = []
    for ref, job in state.placed[state.order[index].id].items():
        if job.phase is Phase.ASLEEP:
            continue  # it cannot end before it wakes
        left = left_ms(state, job, now_ms, percent)
        if left is not None:
            found.append((now_ms + left, job.number, ref.member, job))
    return [(end_ms, job, member) for end_ms, _, member, job in sorted(found, key=_by_time)]


def _by_time(entry: tuple[int, int, int, Job]) -> tuple[int, int, int]:
    return entry[:3]
