"""The world of a replay: what is true about nodes and members, and what happens to them.

Messages are neither lost nor late here. The world where they are is `sim.world`: it is for
finding faults of the controller, this one is for measuring what a policy comes to.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shoal.core.scheduling.predict import Prediction
from shoal.model.commands import Check, Command, Dismiss, Fence, Launch, Prepare, Stop
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from shoal.model.report import MemberExit, NodeGone, NodeReport
from shoal.model.resources import Slice
from shoal.sim.replay.clusters import DAY_MS, NEVER_MS, Conditions, speeds
from shoal.sim.replay.metrics import Levels
from shoal.sim.replay.traces import Arrival

STOPPED_CODE = 143  # as a shell reports the end by SIGTERM

Key = tuple[str, int, int]  # equal to a MemberRef, but cheaper to make


class Truth:
    """One live job as it really is."""

    __slots__ = ("arrival", "attempts", "done_ms", "need", "placed_ms", "predicted", "waiting")

    def __init__(self, arrival: Arrival, need: int) -> None:
        self.arrival = arrival
        self.need = need  # thousandths of GPUs
        self.done_ms = 0  # work that no failure can take away any more
        self.attempts = 0
        self.placed_ms = -1
        self.predicted: Prediction | None = None  # as a user who asked would have been told
        self.waiting = True


class Attempt:
    """One incarnation of a job: it begins when all members have started, and halts once."""

    __slots__ = (
        "begin_ms",
        "halt_ms",
        "job",
        "missing",
        "needed_ms",
        "number",
        "placed_ms",
        "restart_ms",
        "scale",
        "slices",
        "speed",
        "truth",
    )

    def __init__(
        self, job: str, number: int, truth: Truth, slices: tuple[Slice, ...], now_ms: int
    ) -> None:
        self.job = job
        self.number = number
        self.truth = truth
        self.slices = slices
        self.missing = len(slices)  # members whose order to start has not come yet
        self.placed_ms = now_ms
        self.begin_ms = -1
        self.halt_ms = -1
        self.needed_ms = 0  # at full speed of these members
        self.restart_ms = 0
        self.scale = len(slices) / truth.arrival.spec.members  # an elastic gang may be smaller
        self.speed = 1.0


class SimNode:
    """A node of the world, and its side of the protocol."""

    __slots__ = (
        "exits",
        "incarnation",
        "index",
        "members",
        "placed",
        "sequence",
        "spec",
        "speed",
        "stopping",
        "up",
    )

    def __init__(self, spec: NodeSpec, index: int, speed: float) -> None:
        self.spec = spec
        self.index = index
        self.speed = speed
        self.up = True
        self.incarnation = 1
        self.sequence = 0
        self.members: dict[MemberRef, Attempt] = {}  # ordered to start, and not over
        self.stopping: dict[MemberRef, None] = {}
        self.exits: dict[MemberRef, MemberExit] = {}
        self.placed: dict[Key, Attempt] = {}  # what the controller holds slices for

    def report(self) -> NodeReport:
        self.sequence += 1
        return NodeReport(
            spec=self.spec,
            incarnation=self.incarnation,
            sequence=self.sequence,
            alive=tuple([ref for ref, attempt in self.members.items() if attempt.begin_ms >= 0]),
            stopping=tuple(self.stopping),
            exits=tuple(self.exits.values()),
        )

    def exited(self, ref: MemberRef, code: int, *, stopped: bool) -> None:
        self.members.pop(ref, None)
        self.stopping.pop(ref, None)
        self.exits[ref] = MemberExit(ref, code, "", stopped)

    def vanish(self, ref: MemberRef) -> None:
        del self.members[ref]
        self.stopping.pop(ref, None)

    def break_down(self) -> None:
        self.up = False
        self.members.clear()
        self.stopping.clear()
        self.exits.clear()

    def come_back(self) -> None:
        self.up = True
        self.incarnation += 1
        self.sequence = 0


class World:
    """What is to happen stands in a heap of (time, sequence), so that runs are repeatable."""

    def __init__(
        self, nodes: Sequence[NodeSpec], conditions: Conditions, levels: Levels, seed: int
    ) -> None:
        self.conditions = conditions
        self.levels = levels
        self.rng = random.Random(f"replay {seed}")
        factors = speeds(len(nodes), conditions.slow_nodes, random.Random(f"slow {seed}"))
        self.order = [SimNode(spec, index, factors[index]) for index, spec in enumerate(nodes)]
        self.nodes = {node.spec.id: node for node in self.order}
        self.attempts: dict[str, Attempt] = {}  # by job: there is one at most
        self.failures: Counter[str] = Counter()  # by cause
        self.broken = 0  # nodes
        self.now_ms = 0
        self._heap: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._pushed = 0
        self._dirty: dict[str, SimNode] = dict(self.nodes)  # have something to report
        self._gone: list[NodeGone] = []
        self._plan_failure()

    def next_ms(self) -> int:
        """When something happens next, if the controller does nothing."""
        if self._dirty or self._gone:
            return self.now_ms
        return self._heap[0][0] if self._heap else NEVER_MS

    def look(self, now_ms: int) -> tuple[tuple[NodeReport, ...], tuple[NodeGone, ...]]:
        """Let happen all that happens until now, and tell what there is to see."""
        self.now_ms, heap = now_ms, self._heap
        while heap and heap[0][0] <= now_ms:
            _, _, happen, subject = heapq.heappop(heap)
            happen(subject)
        dirty, self._dirty = self._dirty, {}
        gone, self._gone = self._gone, []
        return tuple([node.report() for node in dirty.values() if node.up]), tuple(gone)

    def obey(self, commands: Iterable[Command]) -> None:
        stops: dict[str, list[tuple[SimNode, MemberRef]]] = {}
        for command in commands:
            if isinstance(command, (Check, Prepare, Dismiss, Fence)):
                continue  # nobody is slow here
            node, ref = self.nodes[command.node], command.ref
            if not node.up or command.incarnation != node.incarnation:
                continue
            if type(command) is Launch:
                self._launch(node, ref)
            elif type(command) is not Stop:
                node.exits.pop(ref, None)
            elif ref not in node.members:
                if ref not in node.exits:  # the controller waits for an end
                    node.exited(ref, STOPPED_CODE, stopped=True)
                    self._dirty[node.spec.id] = node
            elif ref not in node.stopping:
                node.stopping[ref] = None
                self._halt(node.members[ref])
                stops.setdefault(ref.job, []).append((node, ref))
        for members in stops.values():
            self._at(self.now_ms + self.conditions.stop_ms, self._stopped, members)

    def _launch(self, node: SimNode, ref: MemberRef) -> None:
        attempt = self.attempts.get(ref.job)
        if attempt is None or attempt.number != ref.attempt or attempt.halt_ms >= 0:
            return
        if ref in node.members or ref in node.exits:  # the order came before
            return
        node.members[ref] = attempt
        attempt.missing -= 1
        if not attempt.missing:
            own_ms = attempt.truth.arrival.start_up_ms
            start_up_ms = self.conditions.start_up_ms if own_ms is None else own_ms
            self._at(self.now_ms + start_up_ms, self._begin, attempt)

    def _at(self, time_ms: int, happen: Callable[[Any], None], subject: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (time_ms, self._pushed, happen, subject))

    # -- the life of an attempt -----------------------------------------------------------

    def _begin(self, attempt: Attempt) -> None:
        if attempt.halt_ms >= 0:
            return
        conditions, truth = self.conditions, attempt.truth
        attempt.begin_ms = self.now_ms
        for slice_ in attempt.slices:
            node = self._dirty[slice_.node] = self.nodes[slice_.node]
            attempt.speed = min(attempt.speed, node.speed)  # all wait for the slowest
        if conditions.stragglers.share and self.rng.random() < conditions.stragglers.share:
            attempt.speed = min(attempt.speed, conditions.stragglers.speed)
        if attempt.number > 1:
            attempt.restart_ms = conditions.restart_cost_ms
        attempt.needed_ms = math.ceil((truth.arrival.work_ms - truth.done_ms) / attempt.scale)
        run_ms = attempt.restart_ms + math.ceil(attempt.needed_ms / attempt.speed)
        self._at(self.now_ms + run_ms, self._end, attempt)

    def _end(self, attempt: Attempt) -> None:
        if attempt.halt_ms >= 0:
            return
        self._halt(attempt, complete=True)
        code = attempt.truth.arrival.exit_code
        for number, slice_ in enumerate(attempt.slices):
            node = self._dirty[slice_.node] = self.nodes[slice_.node]
            node.exited(MemberRef(attempt.job, attempt.number, number), code, stopped=False)

    def _stopped(self, members: list[tuple[SimNode, MemberRef]]) -> None:
        for node, ref in members:
            if ref in node.members:  # else the node broke first
                node.exited(ref, STOPPED_CODE, stopped=True)
                self._dirty[node.spec.id] = node

    def _halt(self, attempt: Attempt, *, complete: bool = False) -> None:
        """No member works any more: what of the work so far is kept."""
        if attempt.halt_ms >= 0:
            return
        attempt.halt_ms = now_ms = self.now_ms
        if attempt.begin_ms < 0:
            return
        truth = attempt.truth
        ran_ms = now_ms - attempt.begin_ms
        restart_ms = min(ran_ms, attempt.restart_ms)
        came_ms = kept_ms = attempt.needed_ms
        if not complete:
            came_ms = min(came_ms, int((ran_ms - restart_ms) * attempt.speed))
            every_ms = truth.arrival.checkpoint_ms
            if every_ms is None:
                every_ms = self.conditions.checkpoint_ms
            kept_ms = came_ms - came_ms % every_ms if every_ms else came_ms
        truth.done_ms = min(truth.done_ms + int(kept_ms * attempt.scale), truth.arrival.work_ms)

    # -- failures -------------------------------------------------------------------------

    def _plan_failure(self) -> None:
        rate = self.conditions.failures.per_1000_node_days * len(self.order) / (1000 * DAY_MS)
        if rate > 0:
            self._at(self.now_ms + 1 + int(self.rng.expovariate(rate)), self._fail, None)

    def _fail(self, _: None) -> None:
        failures = self.conditions.failures
        node = self.order[self.rng.randrange(len(self.order))]
        weights = [cause.weight for cause in failures.causes]
        cause = self.rng.choices(failures.causes, weights)[0]
        self._plan_failure()
        if not node.up:
            return
        self.failures[cause.name] += 1
        if cause.breaks_node:
            for attempt in node.members.values():
                self._halt(attempt)
            self._gone.append(NodeGone(node.spec.id, node.incarnation, cause.name))
            node.break_down()
            self.levels.resize(self.now_ms, -self.levels.size(node.spec))
            self.broken += 1
            self._at(self.now_ms + failures.repair_ms, self._repair, node)
            return
        for ref, attempt in list(node.members.items()):
            if attempt.begin_ms >= 0:  # what runs vanishes; what only starts comes up afterwards
                self._halt(attempt)
                node.vanish(ref)
                self._dirty[node.spec.id] = node

    def _repair(self, node: SimNode) -> None:
        node.come_back()
        self.levels.resize(self.now_ms, self.levels.size(node.spec))
        self.broken -= 1
        self._dirty[node.spec.id] = node
