"""How many nodes of which supply are wanted: order them for jobs that wait, and give back what
nobody uses."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from shoal.core.features.supply.orders import give_back, judge_nodes, provision, release
from shoal.core.scheduling.ends import lives_ms, need_ms, outlives
from shoal.core.scheduling.order import Walk
from shoal.core.scheduling.packing import Bin, Bins, empty_level, fits_empty
from shoal.core.scheduling.sleepers import in_use
from shoal.core.state.events.supply import NodesOrdered, OrderUnused
from shoal.core.state.gpu_caps import room_under_caps
from shoal.core.state.queue import Gang, Lane
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.core.state.supplied import (
    START_MS,
    headroom,
    kept_of,
    kind_of,
    next_try_ms,
    nodes_brought,
    orders_of,
    slots_of,
)
from shoal.model.durations import duration_text
from shoal.model.health import Standing
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.resources import Kind, plural
from shoal.model.supply import Order, OrderPhase, Release, Supply, SupplyCommand

LOOK_MS = 1_000  # between two looks at the demand,
LANE_MS = 2  # and this much more for each lane: looking at a long queue takes time
UNWANTED_MS = 30_000  # an order that nobody waits for any more is given back after this long
SOON_MS = 60_000  # a job that will start this soon on a node that is there needs no other
LANES_MAX = 256  # looked at
WORK_MAX = 50_000  # bins looked at
JOBS_MAX = 1_000  # of one lane whose run times are read
ORDERS_PER_LOOK_MAX = 100


def supply(round_: Round) -> list[SupplyCommand]:
    """Looks at the demand once a second at most, and only if something has happened or is due."""
    state, agenda, now_ms = round_.state, round_.state.agenda, round_.now_ms
    if not round_.policy.supply and not state.orders and not state.brought:
        return round_.supplies
    if round_.events:
        if state.brought:
            judge_nodes(round_)
        at_ms = agenda.supplied_ms + LOOK_MS + LANE_MS * len(state.queue.lanes)
        if agenda.supply_ms is None or at_ms < agenda.supply_ms:
            agenda.supply_ms = at_ms
    if agenda.supply_ms is None or now_ms < agenda.supply_ms or round_.more:
        return round_.supplies
    agenda.supplied_ms, agenda.supply_ms = now_ms, None
    sent = {command.order for command in round_.supplies if isinstance(command, Release)}
    for order in list(state.orders.values()):
        if order.release and order.id not in sent:
            give_back(round_, order)
    need = Need(round_)
    need.look()
    _give_back_unused(round_, need)
    taken = {name for order in state.orders.values() for name in order.nodes}
    for one, why in need.wanted[:ORDERS_PER_LOOK_MAX]:
        _order(round_, one, why, taken)
    if len(need.wanted) > ORDERS_PER_LOOK_MAX:
        look_at(state, now_ms + LOOK_MS)
    return round_.supplies


class Need:
    """One look at the queue: which gangs would start if more nodes came?"""

    def __init__(self, round_: Round) -> None:
        self._round = round_
        self._state = state = round_.state
        self.partial = False  # not the whole queue was looked at
        self.wanted: list[tuple[Supply, str]] = []  # one entry for each lot, and why
        self._left: dict[str, int] = {}  # nodes that each supply may still bring
        self._kinds: dict[str, Kind] = {}
        for one in round_.policy.supply:
            self._kinds[one.name] = kind_of(state, one)
            self._left[one.name] = headroom(state, one) if self._may_ask(one) else 0
        self._groups: dict[str, list[tuple[str, int]]] = {}  # orders and their nodes, oldest first
        # Orders that have waited for machines beyond their supply's patience: other supplies are
        # asked first, and only what those cannot serve is left to these.
        self.late: set[str] = set()
        self._late_bins: Counter[Bin] = Counter()
        self._unserved: list[tuple[Gang, list[int], int | None]] = []
        self.bins = Bins(self._free(dict(self._kinds)))

    def look(self) -> None:
        """Jobs at the front come first, as they do when nodes have come."""
        state, now_ms = self._state, self._round.now_ms
        for one in self._round.policy.supply:
            short = min(one.least - kept_of(state, one.name), self._left[one.name])
            if short > 0:
                self._take(one, -(-short // one.lot), f"least is {one.least}")
        lanes = self._lanes()
        if not lanes:
            return
        front: dict[Lane, list[str]] = {}  # jobs for which room is reserved
        for job_id in state.reservations:
            lane = state.queue.lane.get(state.jobs[job_id].number)
            if lane is not None:
                front.setdefault(lane, []).append(job_id)
        slow = {state.orders[order_id].supply.name for order_id in sorted(self.late)}
        spared = {name: left for name, left in self._left.items() if name in slow}
        self._left |= dict.fromkeys(spared, 0)
        walk = Walk(state, now_ms, lanes)
        self.partial = True
        for _ in range(LANES_MAX):
            head = walk.next()
            if head is None:
                self.partial = False
                break
            if self.bins.looked > WORK_MAX:
                break
            self._serve(head[2], front.get(head[2], []))
        if self.late:
            self._left |= spared
            for bin_, count in self._late_bins.items():
                self.bins.add(bin_, count)
            unserved, self._unserved = self._unserved, []
            for part in unserved:
                self._serve_part(*part)

    def awaited(self) -> set[str]:
        """Orders whose nodes some waiting gang needs: of those that are alike, the oldest."""
        found: set[str] = set()
        for group, orders in self._groups.items():
            left = self.bins.used[group]
            for order, nodes in orders:
                if left > 0:
                    found.add(order)
                left -= nodes
        return found

    def _free(self, kinds: dict[str, Kind]) -> list[tuple[Bin, int]]:
        """What is free: on nodes that are there, the idle ordered ones last; then what comes."""
        state = self._state
        counts: Counter[Bin] = Counter()
        for kind, index in state.cluster.free.items():
            for level, nodes in index.nodes.items():
                counts[Bin(kind, level)] += len(nodes)
        for ends_ms, index_ in state.endings:
            if state.order[index_].schedulable:
                room = state.rooms[index_]
                counts[Bin(room.kind, room.level)] -= 1
                counts[Bin(room.kind, room.level, ends_ms=ends_ms)] += 1
        there: Counter[Bin] = Counter()
        coming: Counter[Bin] = Counter()
        for order in state.orders.values():
            if order.release:
                continue
            name = order.supply.name
            brought = nodes_brought(state, order.id)
            idle = not any(state.placed[node.id] for node in brought)
            for node in brought:
                bin_ = _bin_of(state, node)
                if node.schedulable and idle:  # only then does it matter whether they are wanted
                    counts[bin_] -= 1
                    self._grouped(there, bin_, f"{name} there", order.id, 1)
                elif node.health is NodeHealth.JOINING and node.intent is NodeIntent.OPEN:
                    self._grouped(coming, bin_, f"{name} joining", order.id, 1)
            if missing := expected(state, order, self._round.now_ms):
                kind = kinds[name] = kinds.get(name) or kind_of(state, order.supply)
                lives = lives_ms(order.supply)
                ends_ms = self._round.now_ms + lives if lives else 0
                bin_ = Bin(kind, empty_level(kind), ends_ms=ends_ms)
                if self._is_late(order):
                    self.late.add(order.id)
                    self._grouped(self._late_bins, bin_, f"{name} late", order.id, missing)
                else:
                    self._grouped(coming, bin_, f"{name} coming", order.id, missing)
        free = [(bin_, count) for bin_, count in counts.items() if count > 0]
        return [*free, *there.items(), *coming.items()]

    def _is_late(self, order: Order) -> bool:
        patience_ms = order.supply.patience_ms
        if order.phase is not OrderPhase.PENDING or not patience_ms:
            return False
        due_ms = order.since_ms + patience_ms
        if self._round.now_ms < due_ms:
            look_at(self._state, due_ms)
        return self._round.now_ms >= due_ms

    def _grouped(self, bins: Counter[Bin], bin_: Bin, name: str, order: str, nodes: int) -> None:
        group = f"{name} {bin_}"
        bins[bin_._replace(group=group)] += nodes
        self._groups.setdefault(group, []).append((order, nodes))

    def _lanes(self) -> list[Lane]:
        """Those whose gangs a supply could take."""
        if not any(self._left.values()) and not self._state.orders:
            return []
        kinds = list(self._kinds.values())
        return [
            lane
            for gang, of_gang in self._state.queue.of_gang.items()
            if any(fits_empty(gang, kind) for kind in kinds)
            for lane in of_gang
        ]

    def _may_ask(self, one: Supply) -> bool:
        """Only an engine that answers is asked, and not at once after it failed."""
        heard = self._state.heard.supplied.get(one.engine)
        if heard is None or heard.problem:
            return False
        if any(order.failed for order in orders_of(self._state, one.name)):
            return False  # until it has ended, and from then on by the rule below
        again_ms = next_try_ms(self._state, one.name)
        if again_ms > self._round.now_ms:
            look_at(self._state, again_ms)
            return False
        return True

    def _serve(self, lane: Lane, front: list[str]) -> None:
        """Find room for the jobs of a lane, in what is there or in what may be ordered."""
        state = self._state
        reserved = [state.reservations[job_id] for job_id in front]
        soon_ms = self._round.now_ms + SOON_MS
        soon = sum(
            one.start_ms is not None
            and one.start_ms <= soon_ms
            and all(state.order[index].schedulable for index in one.nodes)
            for one in reserved
        )
        numbers = [number for _, number in state.queue.lanes[lane][soon:]]
        room = room_under_caps(state, lane.tenant) if lane.gang.gpu_milli else None
        if room is not None:
            numbers = numbers[: room // lane.gang.gpu_milli]
        served = [self._serve_part(lane.gang, *part) for part in self._parts(numbers)]
        if not all(served):  # what is kept for them is not free for the lanes behind
            for one_ in reserved:
                for index in one_.nodes:
                    self.bins.drop(_bin_of(state, state.order[index]))

    def _parts(self, numbers: list[int]) -> list[tuple[list[int], int | None]]:
        """Jobs, and until when their nodes must live; None: forever. Jobs that would start on
        nodes of the same supplies are one part: a long job must not make a short one look long."""
        ending = [one for one in self._round.policy.supply if one.lasts_ms]
        if not self._state.endings and not ending:
            return [(numbers, None)]
        parts: dict[tuple[bool, ...], tuple[list[int], int | None]] = {}
        for number in numbers[:JOBS_MAX]:
            job = self._state.job_numbered(number)
            need = need_ms(self._state, job)
            key = (need is None, *(outlives(self._state, job, one) for one in ending))
            until_ms = None if need is None else self._round.now_ms + need
            others, longest_ms = parts.setdefault(key, ([], until_ms))
            others.append(number)
            if until_ms is not None and longest_ms is not None:
                parts[key] = (others, max(until_ms, longest_ms))
        return list(parts.values())

    def _serve_part(self, gang: Gang, numbers: list[int], until_ms: int | None) -> bool:
        """Is there room for all of them, now or in what is ordered?"""
        jobs = len(numbers)
        held = self.bins.holds(gang, jobs * gang.members, until_ms)
        while jobs * gang.members > held:
            choice = self._cheapest(gang, numbers, held)
            if choice is None:
                break
            one, lots = choice
            first = self._state.job_numbered(numbers[held // gang.members])
            others = jobs - held // gang.members - 1
            more = f" and {plural(others, 'other job')} like it" if others > 0 else ""
            self._take(one, lots, f"{first.label}{more} would fit there")
            held = self.bins.holds(gang, jobs * gang.members, until_ms)
        served = min(jobs, held // gang.members)
        self.bins.take(gang, served * gang.members, until_ms)
        if served < jobs and self.late:
            self._unserved.append((gang, numbers[served:], until_ms))
        return served == jobs

    def _cheapest(self, gang: Gang, numbers: list[int], held: int) -> tuple[Supply, int] | None:
        """The supply that serves more jobs for the least money each; then the first one named."""
        best: tuple[Fraction, Supply, int] | None = None
        for one in self._round.policy.supply:
            each, left = fits_empty(gang, self._kinds[one.name]), self._left[one.name]
            if not each or not left:
                continue
            suited = self._suited(one, numbers)
            nodes = -(-(suited * gang.members - held) // each)
            lots = min(-(-nodes // one.lot), left // one.lot)
            served = min(suited, (held + lots * one.lot * each) // gang.members)
            served -= held // gang.members
            if lots <= 0 or served <= 0:
                continue
            # Fewer nodes may be enough for as many gangs.
            nodes = -(-((held // gang.members + served) * gang.members - held) // each)
            lots = -(-nodes // one.lot)
            cost = Fraction(lots * one.lot * one.price, served)
            if best is None or cost < best[0]:
                best = (cost, one, lots)
        return None if best is None else best[1:]

    def _suited(self, one: Supply, numbers: list[int]) -> int:
        """How many of the jobs would start on such a node, though it may end."""
        if not one.lasts_ms:
            return len(numbers)
        jobs = map(self._state.job_numbered, numbers[:JOBS_MAX])
        return sum(not outlives(self._state, job, one) for job in jobs)

    def _take(self, one: Supply, lots: int, why: str) -> None:
        self._left[one.name] -= lots * one.lot
        kind = self._kinds[one.name]
        ends_ms = self._round.now_ms + lives_ms(one) if one.lasts_ms else 0
        self.bins.add(Bin(kind, empty_level(kind), ends_ms=ends_ms), lots * one.lot)
        self.wanted += [(one, why)] * lots


def _bin_of(state: State, node: Node) -> Bin:
    room = state.rooms[node.index]
    return Bin(room.kind, room.level, ends_ms=node.ends_ms or 0)


def expected(state: State, order: Order, now_ms: int) -> int:
    """How many nodes of the order have yet to report."""
    late = order.phase is OrderPhase.RUNNING and now_ms - order.since_ms >= START_MS
    return 0 if late else len(order.nodes) - len(state.brought.get(order.id, ()))


def look_at(state: State, at_ms: int) -> None:
    agenda = state.agenda
    agenda.supply_ms = at_ms if agenda.supply_ms is None else min(agenda.supply_ms, at_ms)


def _order(round_: Round, one: Supply, why: str, taken: set[str]) -> None:
    """Names that no order uses, of nodes that are gone."""
    state = round_.state
    names: list[str] = []
    for name in slots_of(one):
        known = state.nodes.get(name)
        gone = known is None or (known.spec.origin == one.name and known.health is NodeHealth.LOST)
        if name not in taken and gone:
            names.append(name)
            taken.add(name)
            if len(names) == one.lot:
                break
    order_id = f"o{state.next_order}"
    round_.emit(
        NodesOrdered(at_ms=round_.now_ms, order=order_id, supply=one, nodes=tuple(names), why=why)
    )
    round_.supplies.append(provision(state.orders[order_id]))


def _give_back_unused(round_: Round, need: Need) -> None:
    """Orders that brought nothing, are not wanted, or have been idle for the supply's time-out."""
    state = round_.state
    supplies = {one.name: one for one in round_.policy.supply}
    awaited = {slice_.node for slices in state.claims.values() for slice_ in slices}
    awaited |= {state.order[index].id for one in state.reservations.values() for index in one.nodes}
    wanted = need.awaited()
    kept = Counter({one.name: kept_of(state, one.name) for one in round_.policy.supply})
    for order in list(state.orders.values()):
        if order.release:
            continue
        one = supplies.get(order.supply.name)
        nodes = [n for n in nodes_brought(state, order.id) if n.health is not NodeHealth.LOST]
        if not nodes and _failed(round_, order):
            continue
        busy = any(in_use(state, node) or node.id in awaited for node in nodes)
        awaits = need.partial or order.id in wanted
        if busy or (awaits and one is not None):
            _set_unused(round_, order, None)
            continue
        late = order.id in need.late
        _judge_unused(round_, order, one, nodes, kept[order.supply.name], late=late)
        if order.release:
            kept[order.supply.name] -= len(order.nodes)


def _judge_unused(
    round_: Round, order: Order, one: Supply | None, nodes: list[Node], kept: int, *, late: bool
) -> None:
    """`kept`: how many nodes of its supply there are that are not given back. `late`: it has
    brought no machine in time, so others were asked."""
    state, now_ms = round_.state, round_.now_ms
    if nodes and all(_useless(node) for node in nodes):
        release(round_, order, f"{nodes[0].id} no longer gets jobs")
        return
    if one is None or kept > one.most:
        most = "the policy no longer has this supply" if one is None else f"most is {one.most}"
        release(round_, order, most)
        return
    if kept - len(order.nodes) < one.least:
        _set_unused(round_, order, None)
        return
    if late:
        waited = duration_text(now_ms - order.since_ms)
        release(round_, order, f"no machine within {waited}: {order.reason}", failed=True)
        return
    since_ms = order.unused_ms
    if since_ms is None:
        since_ms = now_ms
        _set_unused(round_, order, now_ms)
    allowed_ms = one.idle_ms if nodes else min(one.idle_ms, UNWANTED_MS)
    if now_ms - since_ms < allowed_ms:
        look_at(state, since_ms + allowed_ms)
    elif nodes:
        release(round_, order, f"nothing ran there for {duration_text(now_ms - since_ms)}")
    else:
        release(round_, order, "no job needs it anymore")


def _set_unused(round_: Round, order: Order, since_ms: int | None) -> None:
    if order.unused_ms != since_ms:
        round_.emit(OrderUnused(at_ms=round_.now_ms, order=order.id, since_ms=since_ms))


def _useless(node: Node) -> bool:
    closed = node.intent in (NodeIntent.DRAINING, NodeIntent.REMOVED)
    return closed or node.record.standing is Standing.QUARANTINED


def _failed(round_: Round, order: Order) -> bool:
    """Has it brought nothing for too long?"""
    if order.phase is not OrderPhase.RUNNING:
        return False
    due_ms = order.since_ms + START_MS
    if round_.now_ms < due_ms:
        look_at(round_.state, due_ms)
        return False
    lost = order.id in round_.state.brought
    why = "its nodes are lost" if lost else f"no node reported within {duration_text(START_MS)}"
    release(round_, order, why, failed=True)
    return True
