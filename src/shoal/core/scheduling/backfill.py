"""Reservations for blocked jobs, so that jobs behind them fill gaps without delaying them."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from typing import NamedTuple

from shoal.core.scheduling.again import kept_from
from shoal.core.scheduling.ends import last_starts
from shoal.core.scheduling.fit import area_of, members_here
from shoal.core.scheduling.order import takes_turns
from shoal.core.state.apply_room import Overlay
from shoal.core.state.ends import SAFE as SAFE
from shoal.core.state.events.queue import JobReserved
from shoal.core.state.expect import left_ms, run_ms, soonest_ms
from shoal.core.state.queue import Gang, gang_of
from shoal.core.state.room import Level, Room
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.job import Job, Phase
from shoal.model.policy import Preempt
from shoal.model.resources import WHOLE_GPU_MILLI, Demand, Kind, Slice

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
    members: tuple[int, ...]  # of the gang, on each of these nodes


def reserve(round_: Round, job: Job) -> None:
    """Keep the reservation of a job at the front, make one, or replace one that failed. If the end
    of the running jobs is unknown, it only records since when the job is in front."""
    state, now_ms = round_.state, round_.now_ms
    held = state.reservations.get(job.id)
    if held is not None and held.members and held.start_ms and now_ms < held.start_ms:
        ends = last_starts(state, job)
        if all(ends.get(index, held.start_ms) >= held.start_ms for index in held.nodes):
            return
    if now_ms - state.agenda.looked_ms.get(job.id, now_ms - RENEW_AFTER_MS) < RENEW_AFTER_MS:
        return
    state.agenda.looked_ms[job.id] = now_ms
    opening = opening_of(round_, job)
    if opening is None:
        if held is None:
            _emit(round_, job, None, (), (), "first in line")
        return
    again_ms = now_ms + RENEW_AFTER_MS
    late = held is not None and (held.nodes, held.members) == opening[1:]
    if late and opening.start_ms < again_ms:
        round_.look_again(again_ms)  # the jobs there are late; the reservation stays as it is
        return
    names = tuple(state.order[index].id for index in opening.nodes)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    round_.look_again(max(now_ms + 1, opening.start_ms))
    why = f"on {shown}, when the jobs there end"
    _emit(round_, job, opening.start_ms, names, opening.members, why)


def _emit(
    round_: Round,
    job: Job,
    start_ms: int | None,
    nodes: tuple[str, ...],
    members: tuple[int, ...],
    why: str,
) -> None:
    round_.emit(
        JobReserved(
            at_ms=round_.now_ms,
            job=job.id,
            start_ms=start_ms,
            nodes=nodes,
            members=members,
            why=why,
        )
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


class set_aside(Overlay):  # noqa: N801
    """While a plan is made for a gang, treat as held what the jobs that it might delay will need
    when they start. What is left on their nodes cannot delay them. `avoid`: nodes of theirs on
    which not even one member of the gang is left room for."""

    def __init__(self, state: State, gang: Gang, reserved: Reserved) -> None:
        super().__init__(state)
        self.avoid: set[int] = set()
        self.any = False  # is there room for it beside them on any node?
        self.avoid.update(reserved.needs)
        for index in reserved.shared if not gang.whole_nodes else ():
            if state.rooms[index].holds(gang.demand):
                kept, left = reserved.on(index)
                if left.holds(gang.demand):
                    self.any = True
                    self.avoid.discard(index)
                    for slice_ in kept:
                        self.change(slice_, -1)


class Reserved:
    """What these jobs will need on their nodes, computed when it is asked for. In one cycle a node
    only loses room, so what is known of it holds until it does."""

    def __init__(self, state: State, delayed: Iterable[str], now_ms: int) -> None:
        self._made_for = [(other, state.reservations[other]) for other in delayed]
        self.needs = _needs(state, delayed)
        self.shared = [
            index for index, needs in self.needs.items() if all(need.members for need in needs)
        ]
        self._state, self._now_ms = state, now_ms
        self._known: dict[int, tuple[Level, list[Slice], Room]] = {}
        self._left: dict[str, int | None] = {}  # by job: how much longer it will run

    @property
    def valid(self) -> bool:
        held = self._state.reservations
        return all(held.get(other) is before for other, before in self._made_for)

    def on(self, index: int) -> tuple[list[Slice], Room]:
        """What is held back for them on this node, and the room that is left."""
        level, found = self._state.rooms[index].level, self._known.get(index)
        if found is None or found[0] != level:
            left = self._state.rooms[index].copy()
            kept = list(_kept(self._state, index, self.needs[index], self._now_ms, self._left))
            for slice_ in kept:
                left.change(slice_, -1)
            found = self._known[index] = (level, kept, left)
        return found[1:]


def nodes_of(state: State, delayed: Iterable[str]) -> set[int]:
    """The nodes on which room is reserved for these jobs."""
    return {index for other in delayed for index in state.reservations[other].nodes}


def delays(state: State, holder: Job, index: int, gang: Gang, count: int) -> bool:
    """Could so many members of a gang without GPUs, on this node, be in the way of one that waits
    for GPUs, whenever these become free? What is held beside GPUs becomes free with them."""
    room, waits = state.rooms[index], gang_of(holder)
    demand, share = waits.demand, waits.demand.share_milli(room.kind)
    if not demand.suits(room.kind):
        return False
    most = room.kind.gpus // demand.gpus
    if share < WHOLE_GPU_MILLI:
        most = room.kind.gpus * (WHOLE_GPU_MILLI // share)
    most = min(most, waits.per_node or waits.members)
    held = [
        slice_
        for ref, job in state.placed[state.order[index].id].items()
        if (slice_ := job.members[ref.member].held).gpus
    ]
    cpu_milli = room.cpu_milli + sum(slice_.cpu_milli for slice_ in held)
    memory_mb = room.memory_mb + sum(slice_.memory_mb for slice_ in held)
    return (
        cpu_milli - gang.demand.cpu_milli * count < most * demand.cpu_milli
        or memory_mb - gang.demand.memory_mb * count < most * demand.memory_mb
    )


class _Need(NamedTuple):
    """What a reservation wants of one node. No members: all of it."""

    start_ms: int
    gang: Gang
    members: int


def _needs(state: State, delayed: Iterable[str]) -> dict[int, list[_Need]]:
    """By node, the reservation that begins first comes first."""
    found: dict[int, list[_Need]] = {}
    for other in delayed:
        held, gang = state.reservations[other], gang_of(state.jobs[other])
        counts = held.members if not gang.whole_nodes else ()
        for index, members in zip_longest(held.nodes, counts, fillvalue=0):
            found.setdefault(index, []).append(_Need(held.start_ms or 0, gang, members))
    for needs in found.values():
        needs.sort(key=lambda need: need.start_ms)
    return found


def _kept(
    state: State, index: int, needs: list[_Need], now_ms: int, known: dict[str, int | None]
) -> Iterator[Slice]:
    """What is free on the node now and must be free, or be held by jobs that have ended, when the
    reservations begin. They may have been made without regard to each other; together they take
    what there will be."""
    room, future = state.rooms[index], state.rooms[index].copy()
    ends, next_ = _ends(state, index, now_ms, TYPICAL, known), 0
    cpu_milli = memory_mb = 0
    taken, back = [0] * len(room.gpu_milli), [0] * len(room.gpu_milli)
    cpu_back = memory_back = 0
    for need in needs:
        while next_ < len(ends) and ends[next_].at_ms <= need.start_ms:
            future.change(
                ends[next_].held, +1, exclusive=ends[next_].alone, asleep=ends[next_].lent
            )
            next_ += 1
        demand = need.gang.demand
        _take(room, future, taken, demand, need.members)
        cpu_milli += demand.cpu_milli * need.members
        memory_mb += demand.memory_mb * need.members
        cpu_back = max(cpu_back, room.cpu_milli - max(0, future.cpu_milli - cpu_milli))
        memory_back = max(memory_back, room.memory_mb - max(0, future.memory_mb - memory_mb))
        for gpu, milli in enumerate(room.gpu_milli):
            back[gpu] = max(back[gpu], milli - max(0, future.gpu_milli[gpu] - taken[gpu]))
    name = state.order[index].id
    yield Slice(name, (), cpu_back, memory_back)
    for share in sorted({*back} - {0}):
        gpus = tuple(gpu for gpu, milli in enumerate(back) if milli == share)
        yield Slice(name, gpus, 0, 0, share)


def _take(room: Room, future: Room, taken: list[int], demand: Demand, members: int) -> None:
    """The GPUs that these members will take: those that will be free enough, and of these the ones
    that others use now, so that free ones stay free."""
    share = demand.share_milli(room.kind)
    each = 1 if share < WHOLE_GPU_MILLI else demand.gpus * members
    for _ in range(members * bool(demand.gpus) if share < WHOLE_GPU_MILLI else bool(each)):
        left = [milli - taken[gpu] for gpu, milli in enumerate(future.gpu_milli)]
        best = sorted(
            range(len(left)),
            key=lambda gpu: (left[gpu] < share, room.gpu_milli[gpu], -left[gpu], gpu),
        )
        for gpu in best[:each]:
            taken[gpu] += share


def opening_of(round_: Round, job: Job) -> Opening | None:
    """The first one, if jobs run for as long as is typical. It is asked for when others might move
    for the job, and again when they do not."""
    key = (job.id, len(round_.events))
    if round_.opening is None or round_.opening[0] != key:
        round_.opening = key, first_opening(round_.state, job, round_.now_ms, TYPICAL)
    found: Opening | None = round_.opening[1]
    return found


def first_opening(state: State, job: Job, now_ms: int, percent: int) -> Opening | None:
    """Looks at every open node that the job may use: what it holds now, and when it will hold
    more."""
    gang, avoid = gang_of(job), kept_from(state, job, now_ms)
    ends, search = last_starts(state, job), _Search(state, gang, now_ms, percent)
    if gang.bound:
        openings = [
            opening
            for nodes in _areas(state, gang, avoid)
            if (opening := _opening_among(nodes, search, ends)) is not None
        ]
        return min(openings, default=None)
    everywhere = (
        node.index for node in state.order if node.schedulable and node.index not in avoid
    )
    return _opening_among(islice(everywhere, NODES_MAX + gang.members), search, ends)


def _areas(state: State, gang: Gang, avoid: Collection[int]) -> list[list[int]]:
    """The open nodes of each area that the gang could stay within."""
    groups: dict[str, list[int]] = {}
    for node in state.order:
        if node.schedulable and node.index not in avoid:
            groups.setdefault(area_of(state, node, gang), []).append(node.index)
    return list(groups.values())


def _opening_among(
    nodes: Iterable[int], search: _Search, ends: Mapping[int, int]
) -> Opening | None:
    """`ends`: the last moment at which the gang may start on a node."""
    gang, line = search.gang, search.line(nodes)
    room, unit, chosen = 0, gang.per_node or 1, dict[int, int]()
    while line:
        if search.settle(line):
            continue
        when_ms, index = line[0]
        more, next_ms = search.gain(when_ms, index)
        if next_ms is None:
            heapq.heappop(line)
        else:
            heapq.heapreplace(line, (next_ms, index))
        if not more:
            continue
        if ends:  # the gang would start now, so that nodes that end soon do not count any more
            for late in [node for node in chosen if ends.get(node, when_ms) < when_ms]:
                room -= chosen.pop(late)
            if ends.get(index, when_ms) < when_ms:
                continue
        room += more
        chosen[index] = chosen.get(index, 0) + more
        if room >= gang.members:
            chosen[index] -= (room - gang.members) // unit * unit
            nodes_ = tuple(sorted(node for node, members in chosen.items() if members))
            return Opening(when_ms, nodes_, tuple(chosen[node] for node in nodes_))
    return None


class _Search:
    """When nodes get room for more members of a gang as their jobs end. Nodes stand in line by
    when that may happen next, so that only those at its front are looked at closely."""

    def __init__(self, state: State, gang: Gang, now_ms: int, percent: int) -> None:
        self.gang = gang
        self._state, self._now_ms, self._percent = state, now_ms, percent
        self._left: dict[str, int | None] = {}  # by job: how much longer it will run
        self._soonest: dict[str, int | None] = {}  # by job: at least
        self._silent = state.estimates.silent
        self._rough: set[int] = set()  # nodes that stand in line at the earliest time possible
        self._here: dict[tuple[Kind, Level], int] = {}  # members that such a node holds
        self._nodes: dict[int, _Future] = {}

    def line(self, nodes: Iterable[int]) -> list[tuple[int, int]]:
        """A heap of (when to look at it, node)."""
        line, rooms, now_ms = [], self._state.rooms, self._now_ms
        known = self._here
        for index in nodes:
            room = rooms[index]
            holds = known.get((room.kind, room.level))
            if holds is None:
                holds = self._holds(room.kind, room.level)
            if holds > 0:
                line.append((now_ms, index))
            elif holds == 0 and (first_ms := self._first_end(index, rough=True)) is not None:
                line.append((first_ms, index))
                self._rough.add(index)
        heapq.heapify(line)
        return line

    def settle(self, line: list[tuple[int, int]]) -> bool:
        """Let the first node in line stand at its own time. Did it stand earlier?"""
        index = line[0][1]
        if index not in self._rough:
            return False
        self._rough.remove(index)
        when_ms = self._first_end(index)
        assert when_ms is not None, "the end of one of its jobs is expected"
        heapq.heapreplace(line, (when_ms, index))
        return True

    def gain(self, when_ms: int, index: int) -> tuple[int, int | None]:
        """How many more members it holds then, and when to look at it next."""
        future = self._nodes.get(index)
        if future is None:
            room = self._state.rooms[index]
            future = self._nodes[index] = _Future(room.copy())
            if when_ms == self._now_ms:
                future.holds = self._holds(room.kind, room.level)
                next_ms = None if future.holds >= self.gang.members else self._first_end(index)
                return future.holds, next_ms
        if future.ends is None:
            ends = _ends(self._state, index, self._now_ms, self._percent, self._left)
            future.ends = list(reversed(ends))
        free, ends = future.free, future.ends
        while ends and ends[-1].at_ms == when_ms:
            _, held, alone, lent = ends.pop()
            free.change(held, +1, exclusive=alone, asleep=lent)
        before = future.holds
        future.holds = max(before, self._holds(free.kind, free.level))
        return future.holds - before, ends[-1].at_ms if ends else None

    def _holds(self, kind: Kind, level: Level) -> int:
        """-1: such a node is of no use to the gang, however empty."""
        found = self._here.get((kind, level))
        if found is None:
            demand = self.gang.demand
            found = members_here(self.gang, kind, level) if demand.suits(kind) else -1
            self._here[kind, level] = found
        return found

    def _first_end(self, index: int, *, rough: bool = False) -> int | None:
        """Of a job that runs there; `rough`: it is not earlier."""
        state, now_ms, first = self._state, self._now_ms, None
        known, look_up = (self._soonest, _soonest_ms) if rough else (self._left, _left_ms)
        for job in state.placed[state.order[index].spec.id].values():
            if self._silent and not job.spec.estimate_ms and not job.spec.time_limit_ms:
                continue
            if job.id in known:
                left = known[job.id]
            else:
                left = look_up(state, job, now_ms, self._percent, known)
            if left is not None and (first is None or left < first):
                first = left
        return None if first is None else now_ms + first


class _Future:
    """What a node will hold. `ends`: of its members that are still to come, the next one last."""

    __slots__ = ("ends", "free", "holds")

    def __init__(self, free: Room) -> None:
        self.free = free
        self.holds = 0
        self.ends: list[_End] | None = None


class _End(NamedTuple):
    """What a member will give back. `alone`: it uses its whole node."""

    at_ms: int
    held: Slice
    alone: bool
    lent: bool


def _ends(
    state: State, index: int, now_ms: int, percent: int, known: dict[str, int | None]
) -> list[_End]:
    """`known`: how much longer jobs will run, as far as it was looked up before."""
    found: list[tuple[int, int, int, Job]] = []
    for ref, job in state.placed[state.order[index].id].items():
        left = _left_ms(state, job, now_ms, percent, known)
        if left is not None:
            found.append((now_ms + left, job.number, ref.member, job))
    found.sort(key=lambda entry: entry[:3])
    ends = []
    for at_ms, _, number, job in found:
        member = job.members[number]
        alone = job.spec.whole_nodes and not member.lent
        ends.append(_End(at_ms, member.held, alone, member.lent))
    return ends


def _left_ms(
    state: State, job: Job, now_ms: int, percent: int, known: dict[str, int | None]
) -> int | None:
    """Members of one gang end together."""
    if job.id not in known:
        asleep = job.phase is Phase.ASLEEP  # it cannot end before it wakes
        known[job.id] = None if asleep else left_ms(state, job, now_ms, percent)
    return known[job.id]


def _soonest_ms(
    state: State, job: Job, now_ms: int, percent: int, known: dict[str, int | None]
) -> int | None:
    """As above, at least."""
    if job.id not in known:
        asleep = job.phase is Phase.ASLEEP
        known[job.id] = None if asleep else soonest_ms(state, job, now_ms, percent)
    return known[job.id]
