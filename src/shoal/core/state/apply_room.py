"""Index upkeep for nodes and what is free on them; a part of `apply`."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import Self

from shoal.core.books.baseline import forget
from shoal.core.books.foresight import Foresight
from shoal.core.state.asked import kind_of
from shoal.core.state.ends import leaving_times
from shoal.core.state.room import Domain, Level, Room
from shoal.core.state.state import Node, State
from shoal.model.health import Standing
from shoal.model.job import Job, MemberRef
from shoal.model.node import End, NodeHealth, NodeIntent, NodeSpec, domains_in
from shoal.model.policy import Places, Preempt
from shoal.model.resources import Kind, Slice


def add_node(state: State, node: Node) -> None:
    state.nodes[node.id] = node
    room = Room(node.spec, kind_of(state.looks_at, node), domains_of(state, node))
    if node.index < len(state.order):  # the place of one that was forgotten
        state.order[node.index], state.rooms[node.index] = node, room
    else:
        assert node.index == len(state.order), "nodes are indexed in join order"
        state.order.append(node)
        state.rooms.append(room)
    _foresee(state, node.spec)
    state.placed[node.id] = {}
    _brings(state, node)
    if node.record.standing is not Standing.OK:
        state.troubled[node.id] = None
    _count_known(state, node, 1)
    state.caches.roots = None
    if node.end is not None:
        insort(state.endings, (node.end.at_ms, node.index))
    open_up(state, node)


def drop_node(state: State, name: str) -> int:
    """Forget a node that is lost and holds nothing; returns the index that is free now."""
    node = state.nodes.pop(name)
    assert node.health is NodeHealth.LOST, name
    assert not state.placed.pop(name), name
    _count_known(state, node, -1)
    if node.end is not None:
        state.endings.remove((node.end.at_ms, node.index))
    _brings_no_more(state, node)
    state.troubled.pop(name, None)
    del state.lost[node.index]
    forget(state.fleet, name)
    heard = state.heard
    for book in (heard.said, heard.versions, heard.getting, heard.uses, heard.touched):
        book.pop(name, None)
    for told in (heard.asked, heard.verdicts, heard.own_ends, heard.listens, heard.hangs):
        told.pop(name, None)
    heard.leasing.pop(name, None)
    heard.hold(name, ())
    state.caches.ending = {}
    return node.index


def domains_of(state: State, node: Node) -> tuple[str, ...]:
    """The blocks and racks that it counts in."""
    measured = state.fabric.places.get(node.id, "")
    if state.policy.place is Places.TYPED or not measured:
        return node.spec.domains
    return domains_in(measured)


def file_again(state: State) -> None:
    """Places were measured, or the policy says which count: only nodes that move are touched."""
    moved = False
    for node in state.order:
        room, domains = state.rooms[node.index], domains_of(state, node)
        if room.domains != domains:
            close(state, node)
            room.domains = domains
            open_up(state, node)
            moved = True
    if moved:
        state.caches.possible.clear()
        state.agenda.hope()
        state.agenda.other_gaps()
        state.agenda.look_ms = 0


def set_end(state: State, node: Node, own: End | None, wanted: End | None) -> None:
    """The ends that the node says and an operator wants. A later end makes room for longer jobs."""
    close(state, node)
    if node.end is not None:
        state.endings.remove((node.end.at_ms, node.index))
    node.own_end, node.set_end = own, wanted
    if node.end is not None:
        insort(state.endings, (node.end.at_ms, node.index))
    open_up(state, node)
    watch_end(state, node)


def watch_end(state: State, node: Node) -> None:
    """Look at the node in time before its end."""
    for at_ms, _ in leaving_times(state, node):
        state.agenda.look_at_ends(at_ms)


def replace_node(state: State, node: Node, spec: NodeSpec, incarnation: int) -> None:
    """The node starts a new life, perhaps with other resources; it must be closed and empty."""
    assert not state.placed[node.id], "a node that rejoins holds nothing"
    _count_known(state, node, -1)
    if node.spec.order != spec.order:
        _brings_no_more(state, node)
    node.spec = spec
    _brings(state, node)
    node.incarnation = incarnation
    state.rooms[node.index] = Room(spec, kind_of(state.looks_at, node), domains_of(state, node))
    _count_known(state, node, 1)
    state.caches.roots = None
    _foresee(state, spec)


def _brings(state: State, node: Node) -> None:
    if node.spec.order:
        state.brought.setdefault(node.spec.order, {})[node.id] = None


def _brings_no_more(state: State, node: Node) -> None:
    if node.spec.order:
        del state.brought[node.spec.order][node.id]
        if not state.brought[node.spec.order]:
            del state.brought[node.spec.order]


def _foresee(state: State, spec: NodeSpec) -> None:
    if spec.cpu_milli > state.foresight.largest_cpu_milli:
        state.foresight = Foresight(spec.cpu_milli, state.mix)


def set_intent(state: State, node: Node, intent: NodeIntent) -> None:
    _count_known(state, node, -1)
    node.intent = intent
    _count_known(state, node, 1)


def _count_known(state: State, node: Node, change: int) -> None:
    if node.intent is not NodeIntent.REMOVED:
        kind, totals = state.rooms[node.index].kind, state.totals
        state.caches.possible.clear()
        _count(state.capacity, kind, change)
        state.totals = Kind(
            totals.gpus + change * kind.gpus,
            totals.cpu_milli + change * kind.cpu_milli,
            totals.memory_mb + change * kind.memory_mb,
        )


def _count(kinds: dict[Kind, int], kind: Kind, change: int) -> None:
    count = kinds[kind] = kinds.get(kind, 0) + change
    if not count and (kind.labels or kind.taints):
        del kinds[kind]  # such kinds come and go with what jobs ask about


def change_kind(state: State, node: Node, kind: Kind) -> None:
    """Its labels or taints, or what matters of them, have changed; its amounts have not."""
    room = state.rooms[node.index]
    before, room.kind = room.kind, kind
    state.caches.possible.clear()
    if node.intent is not NodeIntent.REMOVED:
        _count(state.capacity, before, -1)
        _count(state.capacity, kind, 1)
    if node.schedulable:
        _count(state.open_capacity, before, -1)
        _count(state.open_capacity, kind, 1)
        state.cluster.change_kind(node.index, room.level, before, kind)
        for division, name in zip(state.divisions, room.domains, strict=False):
            division.domains[name].change_kind(node.index, room.level, before, kind)


def open_up(state: State, node: Node) -> None:
    """Offer the node to the scheduler if it is schedulable."""
    if node.health is NodeHealth.LOST:
        state.lost[node.index] = None
    else:
        state.lost.pop(node.index, None)
    if node.schedulable:
        room = state.rooms[node.index]
        state.cluster.add(node.index, room)
        for division, name in zip(state.divisions, room.domains, strict=False):
            division.add(name, node.index, room)
        _count(state.open_capacity, room.kind, 1)
        if node.end is not None:
            insort(state.open_endings, (node.end.at_ms, node.index))
            state.caches.ending = {}
        gained(state, room)


def close(state: State, node: Node) -> None:
    """Take the node away from the scheduler, before its health or intent changes."""
    if node.schedulable:
        room = state.rooms[node.index]
        state.cluster.remove(node.index, room)
        for division, name in zip(state.divisions, room.domains, strict=False):
            division.remove(name, node.index, room)
        _count(state.open_capacity, room.kind, -1)
        if node.end is not None:
            state.open_endings.remove((node.end.at_ms, node.index))
            state.caches.ending = {}


def gained(state: State, room: Room) -> None:
    """A node has more room than before: gangs whose members fit on it are worth a try."""
    agenda = state.agenda
    if state.preemptible and state.policy.preempt is not Preempt.NEVER:
        agenda.look_ms = 0  # fewer jobs need to be stopped for those in front
    if not agenda.hopeless and not agenda.no_gap and not agenda.stuck:
        return
    known = {lane.gang for lane in agenda.stuck} | {gang for gang, _ in agenda.no_gap}
    fits = {gang for gang in known | agenda.hopeless if room.holds(gang.demand)}
    if fits:
        agenda.hopeless -= fits
        if agenda.hopeful is not None:
            of_gang = state.queue.of_gang
            agenda.hopeful.update((gang, None) for gang in fits if gang in of_gang)
        agenda.no_gap = {entry for entry in agenda.no_gap if entry[0] not in fits}
        agenda.stuck = {
            lane: ahead for lane, ahead in agenda.stuck.items() if lane.gang not in fits
        }


def hold(state: State, job: Job) -> None:
    """The members of a placed job take their slices."""
    numbers: dict[str, list[int]] = {}
    for number, member in enumerate(job.members):
        if not member.over:
            if member.slice.node in numbers:
                numbers[member.slice.node].append(number)
            else:
                numbers[member.slice.node] = [number]
    for node_id, there in numbers.items():
        _hold_on(state, state.nodes[node_id], job, there)
    if state.endings:
        for name in dict.fromkeys(member.slice.node for member in job.members):
            watch_end(state, state.nodes[name])
    if job.master:
        state.masters.update((job.master, job.serves_at))
    if job.spec.yields:
        state.preemptible[job.id] = None
    if job.spec.resizes:
        state.elastic[job.id] = None


def _hold_on(state: State, node: Node, job: Job, numbers: list[int]) -> None:
    """All of its members on one node: the node moves to another level once."""
    room, placed = state.rooms[node.index], state.placed[node.spec.id]
    before = room.level
    for number in numbers:
        member = job.members[number]
        slice_, lent = member.held, member.lent
        placed[MemberRef(job.id, job.attempt, number)] = job
        room.change(slice_, -1, exclusive=job.spec.whole_nodes and not lent, asleep=lent)
        for gpu in slice_.gpus:
            assert room.gpu_milli[gpu] >= 0, f"{slice_} is held"
        if not lent and node.spec.order and (order := state.orders.get(node.spec.order)):
            order.unused_ms = None
    _settle(state, node, room, before)


def release(state: State, job: Job, number: int) -> None:
    """A member is over; what it held is free again."""
    slice_, lent = job.members[number].held, job.members[number].lent
    del state.placed[slice_.node][MemberRef(job.id, job.attempt, number)]
    change(state, slice_, +1, exclusive=job.spec.whole_nodes and not lent, asleep=lent)


def change(
    state: State, slice_: Slice, sign: int, *, exclusive: bool = False, asleep: bool = False
) -> None:
    """A slice is taken (-1) or given back (+1). `asleep`: by a sleeper."""
    room = _shift(state, slice_, sign, exclusive=exclusive, asleep=asleep)
    if sign < 0 and not asleep and (order := state.orders.get(state.nodes[slice_.node].spec.order)):
        order.unused_ms = None
    if sign > 0 and state.nodes[slice_.node].schedulable:
        gained(state, room)
    if sign > 0 and state.wakeful:
        for job in state.placed[slice_.node].values():
            if job.id in state.wakeful:
                state.agenda.beds[job.id] = None


def _shift(
    state: State, slice_: Slice, sign: int, *, exclusive: bool, asleep: bool = False
) -> Room:
    node = state.nodes[slice_.node]
    room = state.rooms[node.index]
    before = room.level
    room.change(slice_, sign, exclusive=exclusive, asleep=asleep)
    _settle(state, node, room, before)
    return room


def _settle(state: State, node: Node, room: Room, before: Level) -> None:
    """The index follows what has changed on the node."""
    if before != (after := room.level) and node.schedulable:
        state.cluster.move(node.index, room.kind, before, after)
        for division, name in zip(state.divisions, room.domains, strict=False):
            division.move(name, node.index, room.kind, before, after)


class Overlay:
    """Tentative changes to what is free, to see what would fit; all undone at the end. The agenda
    stays as it is: a gang known to fit nowhere stays known."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._changes: dict[tuple[Slice, bool, bool], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for (slice_, exclusive, asleep), times in self._changes.items():
            for undone in [-1] * times or [+1] * -times:
                _shift(self._state, slice_, undone, exclusive=exclusive, asleep=asleep)

    def change(
        self, slice_: Slice, sign: int, *, exclusive: bool = False, asleep: bool = False
    ) -> None:
        key = (slice_, exclusive, asleep)
        self._changes[key] = self._changes.get(key, 0) + sign
        _shift(self._state, slice_, sign, exclusive=exclusive, asleep=asleep)


class Opened:
    """These closed nodes as if they were open, to see what would fit. All of it is undone, also
    that their kind or rack was known: the order in which kinds are looked at decides ties."""

    def __init__(self, state: State, nodes: Sequence[Node]) -> None:
        self._state, self._nodes = state, nodes
        self._undo: list[tuple[Node, NodeIntent, tuple[Domain, ...], list[str]]] = []

    def __enter__(self) -> Self:
        for node in self._nodes:
            self._open(node)
        return self

    def _open(self, node: Node) -> None:
        state, room = self._state, self._state.rooms[node.index]
        new = [
            name
            for division, name in zip(state.divisions, room.domains, strict=False)
            if name not in division.domains
        ]
        intent, node.intent = node.intent, NodeIntent.OPEN
        assert node.schedulable, "only its intent kept it closed"
        known = [state.cluster, *self._domains(room)]
        fresh = tuple(domain for domain in known if room.kind not in domain.free)
        state.cluster.add(node.index, room)
        for division, name in zip(state.divisions, room.domains, strict=False):
            division.add(name, node.index, room)
        state.open_capacity[room.kind] = state.open_capacity.get(room.kind, 0) + 1
        if node.end is not None:
            insort(state.open_endings, (node.end.at_ms, node.index))
            state.caches.ending = {}
        self._undo.append((node, intent, fresh, new))

    def _domains(self, room: Room) -> list[Domain]:
        pairs = zip(self._state.divisions, room.domains, strict=False)
        return [division.domains[name] for division, name in pairs if name in division.domains]

    def __exit__(self, *_: object) -> None:
        state = self._state
        while self._undo:
            node, intent, fresh, new = self._undo.pop()
            room = state.rooms[node.index]
            state.cluster.remove(node.index, room)
            for division, name in zip(state.divisions, room.domains, strict=False):
                division.remove(name, node.index, room)
                if name in new:
                    division.forget(name)
            for domain in fresh:
                domain.free.pop(room.kind, None)
            count = state.open_capacity[room.kind] = state.open_capacity[room.kind] - 1
            if not count and fresh and state.cluster in fresh:
                del state.open_capacity[room.kind]
            if node.end is not None:
                state.open_endings.remove((node.end.at_ms, node.index))
                state.caches.ending = {}
            node.intent = intent
