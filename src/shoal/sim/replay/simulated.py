"""The simulated cluster of a replay: nodes that keep the agent's own book, and what members do.

Messages are neither lost nor late here, because a replay measures the effect of a policy.
`storm` loses and delays them, to find faults of the controller.

A member sends beats only where they say more than silence does: in a gang whose members are not
equally fast, and in a job of a history that reported its steps. For every other job the scheduler
and the ledger rely on its `checkpoint_ms`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.core.nodebook import NodeBook
from shoal.core.scheduling.sleeping import LOCK_MS, SLEEP_MB_S, TURN_MB, WAKE_MB_S
from shoal.model.commands import Check, Envelope, Launch, Sleep, Stop, Wake
from shoal.model.fabric import Pair
from shoal.model.health import CheckResult
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from shoal.model.progress import Beat, Progress
from shoal.model.report import Idle, NodeGone, NodeReport, Uses
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.sim.replay.attempts import Attempt as Attempt
from shoal.sim.replay.attempts import SimJob as SimJob
from shoal.sim.replay.clusters import DAY_MS, NEVER_MS, Conditions, speeds
from shoal.sim.replay.metrics import Levels

FAILED_CODE = 1
STOPPED_CODE = 143  # as a shell reports the end by SIGTERM
STEP_MS = 1_000  # a training step at full speed
EARLY_BEATS, EARLY_BEAT_MS = 12, 10_000  # enough for the scheduler to find the slow member
BEAT_MS_MAX = 1_800_000  # between two later beats: the ledger takes an hour's silence for idling
IDLE_REPORT_MS = 60_000  # the ledger books a member as idle after this time
MATMUL_GFLOPS = 100_000  # what a check measures on a node at full speed

Key = tuple[str, int, int]  # equal to a MemberRef, but cheaper to make


class SimNode:
    """A node and its side of the protocol, which is the agent's own book."""

    __slots__ = ("book", "holding", "idle", "index", "progress", "speed", "up")

    def __init__(self, spec: NodeSpec, index: int, speed: float) -> None:
        self.book = NodeBook(spec, 1)
        self.index = index
        self.speed = speed
        self.up = True
        self.idle: dict[MemberRef, int] = {}  # members that use nothing, and since when
        self.progress: list[Progress] = []  # beats that no report carried yet
        self.holding: dict[Key, Attempt] = {}  # what the controller holds slices for

    @property
    def spec(self) -> NodeSpec:
        return self.book.spec

    def report(self, now_ms: int) -> NodeReport:
        progress, self.progress = self.progress, []
        idle = [Idle(ref, now_ms - since_ms) for ref, since_ms in self.idle.items()]
        return self.book.report(tuple(progress), idle=tuple(idle))

    def exited(self, ref: MemberRef, code: int) -> None:
        self.idle.pop(ref, None)
        self.book.exited(ref, code)

    def vanish(self, ref: MemberRef) -> None:
        """The process is gone, and the book has lost it."""
        self.idle.pop(ref, None)
        self.book.alive.pop(ref)
        book = self.book
        for refs in (book.stopping, book.dozing, book.asleep, book.waking, book.woke):
            refs.pop(ref, None)

    def break_down(self) -> None:
        self.up = False
        self.book = NodeBook(self.spec, self.book.incarnation + 1)
        self.idle, self.progress = {}, []


class SimCluster:
    """What will happen is in a heap of (time, sequence), so that runs are repeatable."""

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        conditions: Conditions,
        levels: Levels,
        seed: int,
        idle_marks: Sequence[int] = (),
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
        self.lost = 0  # work that no checkpoint held, in thousandths of GPUs times milliseconds
        self.sleepers = Sleepers(self)
        self.now_ms = 0
        self._idle_marks = (IDLE_REPORT_MS, *(mark_ms for mark_ms in idle_marks if mark_ms))
        self._heap: list[tuple[int, int, Callable[[Any], None], Any]] = []
        self._pushed = 0
        self._news: dict[str, SimNode] = dict(self.nodes)  # nodes that have something to report
        self._gone: list[NodeGone] = []
        self._asked: set[str] = set()  # nodes that report in a second anyway
        self._plan_failure()

    def next_ms(self) -> int:
        """When something happens next, if the controller does nothing."""
        if self._news or self._gone:
            return self.now_ms
        return self._heap[0][0] if self._heap else NEVER_MS

    def look(self, now_ms: int) -> tuple[list[NodeReport], list[NodeGone]]:
        """Run everything due by now, and report the news."""
        self.now_ms, heap = now_ms, self._heap
        while heap and heap[0][0] <= now_ms:
            _, _, happen, subject = heapq.heappop(heap)
            happen(subject)
        news, self._news = self._news, {}
        gone, self._gone = self._gone, []
        for node in news.values():
            if node.spec.sleep == "cuda":
                node.book.uses = self.sleepers.uses(node)
        return [node.report(now_ms) for node in news.values() if node.up], gone

    def take(self, node_id: str, envelope: Envelope) -> None:
        """Commands of the controller for one node."""
        node = self.nodes[node_id]
        if not node.up:
            return
        for command in node.book.take(envelope):
            if type(command) is Launch:
                self._launch(node, command.ref)
            elif type(command) is Stop:
                self._halt(self.attempts[command.ref.job])
                self.at(self.now_ms + self.conditions.stop_ms, self._stopped, (node, command.ref))
            elif type(command) is Sleep or type(command) is Wake:
                self.sleepers.take(node, command)
            elif type(command) is Check:
                node.book.measured(_measured(node, command))
                self._news[node_id] = node
        if node.book.exits and any(type(command) is Stop for command in envelope.commands):
            self._news[node_id] = node  # a member that never started has ended

    def ask(self, node_id: str) -> None:
        """Have a node report within a second, as a live node does anyway."""
        if node_id not in self._asked:
            self._asked.add(node_id)
            self.at(self.now_ms + 1_000, self.reports, node_id)

    def reports(self, node_id: str) -> None:
        self._asked.discard(node_id)
        self._news[node_id] = self.nodes[node_id]

    def mend(self, node_id: str) -> None:
        """A node that was found slow runs at full speed once it is repaired."""
        self.at(self.now_ms + self.conditions.failures.repair_ms, self._mended, node_id)

    def _mended(self, node_id: str) -> None:
        self.nodes[node_id].speed = 1.0

    def at(self, time_ms: int, happen: Callable[[Any], None], subject: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (time_ms, self._pushed, happen, subject))

    def in_its_run(
        self, attempt: Attempt, offset_ms: int, happen: Callable[[Attempt], None]
    ) -> None:
        """Have it happen so long after the attempt began, without the time that it sleeps."""
        self.at(attempt.begin_ms + offset_ms, self._due, (attempt, offset_ms, happen))

    def _due(self, subject: tuple[Attempt, int, Callable[[Attempt], None]]) -> None:
        attempt, offset_ms, happen = subject
        if attempt.halt_ms >= 0:
            return
        if attempt.down:
            attempt.late.append((offset_ms, happen))
            if happen != self._beat:
                self.sleepers.missed(attempt)
        elif attempt.begin_ms + offset_ms > self.now_ms:  # it has slept since this was planned
            self.in_its_run(attempt, offset_ms, happen)
        else:
            happen(attempt)

    # -- the life of an attempt -----------------------------------------------------------

    def _launch(self, node: SimNode, ref: MemberRef) -> None:
        attempt = self.attempts[ref.job]
        node.book.gets(ref, "starts up")
        attempt.missing -= 1
        if not attempt.missing:
            job, own_ms = attempt.sim_job, attempt.sim_job.arrival.start_up_ms
            start_up_ms = self.conditions.start_up_ms if own_ms is None else own_ms
            if attempt.number > 1 and (job.done_ms or not job.arrival.lived):
                start_up_ms += self.conditions.restart_cost_ms
            self.at(self.now_ms + start_up_ms, self._begin, attempt)

    def _begin(self, attempt: Attempt) -> None:
        if attempt.halt_ms >= 0:
            return
        conditions, job = self.conditions, attempt.sim_job
        arrival = job.arrival
        attempt.begin_ms = self.now_ms
        for node_id, ref in attempt.refs():
            node = self._news[node_id] = self.nodes[node_id]
            node.book.begins(ref)
            attempt.own_speeds.append(node.speed)
        if conditions.stragglers.share and self.rng.random() < conditions.stragglers.share:
            attempt.own_speeds[0] = min(attempt.own_speeds[0], conditions.stragglers.speed)
        attempt.speed = min(attempt.own_speeds)
        every_ms = arrival.checkpoint_ms
        attempt.every_ms = conditions.checkpoint_ms if every_ms is None else every_ms
        left_ms = arrival.work_ms - job.done_ms
        if job.failed < len(arrival.failed_ms):
            left_ms = arrival.failed_ms[job.failed]
        attempt.needed_ms = math.ceil(left_ms / attempt.scale)
        attempt.from_step = job.done_ms // STEP_MS
        run_ms = math.ceil(attempt.needed_ms / attempt.speed)
        if arrival.work_ms < NEVER_MS:
            self.in_its_run(attempt, run_ms, self._end)
        uneven = max(attempt.own_speeds) > attempt.speed
        if uneven or arrival.beats:
            attempt.beats = 0 if uneven else EARLY_BEATS
            self._plan_beat(attempt)
        for from_ms, until_ms in arrival.idle_ms:
            self.in_its_run(attempt, from_ms, self._idles)
            if until_ms < NEVER_MS:
                self.in_its_run(attempt, until_ms, self._works)

    def _end(self, attempt: Attempt) -> None:
        job = attempt.sim_job
        code, done_ms = job.arrival.exit_code, job.done_ms
        if job.failed < len(job.arrival.failed_ms):
            code, job.failed = FAILED_CODE, job.failed + 1
        self._halt(attempt, complete=True)
        if code:  # the log shows what the next attempt had to do
            job.done_ms = done_ms
        for node_id, ref in attempt.refs():
            node = self._news[node_id] = self.nodes[node_id]
            node.exited(ref, code)

    def _stopped(self, member: tuple[SimNode, MemberRef]) -> None:
        node, ref = member
        if node.up and ref in node.book.alive:  # else the node broke first
            node.exited(ref, STOPPED_CODE)
            self._news[node.spec.id] = node

    def _halt(self, attempt: Attempt, *, complete: bool = False) -> None:
        """No member works any more: decide how much of the work is kept."""
        if attempt.halt_ms >= 0:
            return
        attempt.halt_ms = self.now_ms
        if attempt.begin_ms >= 0:
            job, came_ms = attempt.sim_job, attempt.came_ms(self.now_ms)
            came_ms = attempt.needed_ms if complete else came_ms
            if attempt.beats >= 0:
                self._send_beats(attempt, came_ms)
            kept_ms = came_ms if complete else attempt.kept_ms(came_ms)
            if kept_ms < came_ms:
                self.lost += (came_ms - kept_ms) * sum(map(self.levels.amount, attempt.slices))
            done_ms = job.done_ms + int(kept_ms * attempt.scale)
            job.done_ms = min(done_ms, job.arrival.work_ms)

    def _plan_beat(self, attempt: Attempt) -> None:
        """A few early beats show which member is slow; then one with every checkpoint."""
        if attempt.beats < EARLY_BEATS:
            next_ms = self.now_ms + EARLY_BEAT_MS
        elif 0 < attempt.every_ms <= BEAT_MS_MAX:
            saves = attempt.came_ms(self.now_ms) // attempt.every_ms + 1
            due_ms = attempt.begin_ms + math.ceil(saves * attempt.every_ms / attempt.speed)
            next_ms = max(self.now_ms + 1, due_ms)  # rounding may leave a save a hair away
        else:
            next_ms = self.now_ms + BEAT_MS_MAX
        self.in_its_run(attempt, next_ms - attempt.begin_ms, self._beat)

    def _beat(self, attempt: Attempt) -> None:
        self._send_beats(attempt, attempt.came_ms(self.now_ms))
        attempt.beats += 1
        self._plan_beat(attempt)

    def _send_beats(self, attempt: Attempt, came_ms: int) -> None:
        steps = came_ms // STEP_MS
        if not steps:
            return
        saved_ms = attempt.kept_ms(came_ms)
        whole_us = int(steps * STEP_MS * 1000 / attempt.speed)
        for (node_id, ref), speed in zip(attempt.refs(), attempt.own_speeds, strict=True):
            own_us = min(whole_us, int(steps * STEP_MS * 1000 / speed))
            beat = Beat(
                ref=str(ref),
                step=attempt.from_step + int(came_ms * attempt.scale) // STEP_MS,
                steps=steps,
                compute_us=own_us,
                wait_us=whole_us - own_us,
                saved_step=attempt.from_step + int(saved_ms * attempt.scale) // STEP_MS,
                busy=True,  # it works until the next beat, which may be long in coming
            )
            node = self._news[node_id] = self.nodes[node_id]
            node.progress.append(Progress(ref, beat, 0))

    def _idles(self, attempt: Attempt) -> None:
        attempt.idle = True
        for node_id, ref in attempt.refs():
            self.nodes[node_id].idle[ref] = self.now_ms
            for mark_ms in self._idle_marks:
                self.at(self.now_ms + mark_ms, self.reports, node_id)

    def _works(self, attempt: Attempt) -> None:
        attempt.idle = False
        for node_id, ref in attempt.refs():
            self.nodes[node_id].idle.pop(ref, None)
            self.reports(node_id)

    # -- failures -------------------------------------------------------------------------

    def _plan_failure(self) -> None:
        rate = self.conditions.failures.per_1000_node_days * len(self.order) / (1000 * DAY_MS)
        if rate > 0:
            self.at(self.now_ms + 1 + int(self.rng.expovariate(rate)), self._fail, None)

    def _fail(self, _: None) -> None:
        failures = self.conditions.failures
        node = self.order[self.rng.randrange(len(self.order))]
        weights = [cause.weight for cause in failures.causes]
        cause = self.rng.choices(failures.causes, weights)[0]
        self._plan_failure()
        if not node.up or node.spec.order:  # suppliers lose nodes in their own way
            return
        self.failures[cause.name] += 1
        refs = list(node.book.alive)
        if cause.breaks_node:
            for ref in refs:
                self._halt(self.attempts[ref.job])
            self._gone.append(NodeGone(node.spec.id, node.book.incarnation, cause.name))
            node.break_down()
            self.levels.resize(self.now_ms, -self.levels.size(node.spec))
            self.broken += 1
            self.at(self.now_ms + failures.repair_ms, self._repair, node)
            return
        for ref in refs:
            if ref not in node.book.getting:  # a starting member comes up afterwards
                self._halt(self.attempts[ref.job])
                node.vanish(ref)
                self._news[node.spec.id] = node

    def _repair(self, node: SimNode) -> None:
        node.up = True
        self.levels.resize(self.now_ms, self.levels.size(node.spec))
        self.broken -= 1
        self._news[node.spec.id] = node

    # -- nodes that come and go -------------------------------------------------------------

    def switch_on(self, node: SimNode, now_ms: int) -> None:
        node.up = True
        self.levels.resize(now_ms, self.levels.size(node.spec), new=True)
        self._news[node.spec.id] = node

    def switch_off(self, node: SimNode, now_ms: int) -> None:
        for ref in node.book.alive:
            self._halt(self.attempts[ref.job])
        node.break_down()
        self.levels.resize(now_ms, -self.levels.size(node.spec), new=True)


def _measured(node: SimNode, check: Check) -> CheckResult:
    if (tour := check.tour) is not None:  # all links of a replay are the same
        pairs = tuple(Pair(host.node, 20, 10_000, 10_000) for host in tour.hosts[: tour.own])
        return CheckResult(id=check.id, pairs=pairs)
    figures = {"matmul_gflops": int(MATMUL_GFLOPS * node.speed)}
    return CheckResult(id=check.id, busy=bool(node.book.alive), figures=figures)


# Members of a replay that sleep: what their nodes do, and what that costs.
#
# A member takes as long as its memory on GPUs takes to move, by the rates that the scheduler
# assumes of a node that has shown none (`core/scheduling/sleeping.py`). No member refuses to sleep.


# Memory of a node that a trace does not describe: 2 TB beside 8 GPUs, as servers with H200 have.
HOST_MB_PER_GPU = 250_000


def able_to_sleep(nodes: Sequence[NodeSpec], *, remaps: bool = False) -> list[NodeSpec]:
    """The same nodes, but each that has GPUs can put jobs to sleep. What a node says of its memory
    counts; one that says nothing has enough for a few sleepers."""
    return [
        node
        if node.sleep or not node.gpus
        else msgspec.structs.replace(
            node,
            sleep="cuda",
            sleep_why="",
            remaps=remaps,
            memory_mb=node.memory_mb or node.gpus * HOST_MB_PER_GPU,
            gpu_memory_mb=node.gpu_memory_mb or TURN_MB,
        )
        for node in nodes
    ]


def gpu_mb(node: NodeSpec, attempt: Attempt, number: int) -> int:
    """What a member has on its GPUs: as the trace says, else as much as TURN_MB on each."""
    slice_ = attempt.slices[number]
    each = attempt.sim_job.arrival.gpu_mb or TURN_MB
    if node.gpu_memory_mb:
        each = min(each, node.gpu_memory_mb)
    return each * len(slice_.gpus) * slice_.gpu_milli // WHOLE_GPU_MILLI


class Sleepers:
    """A job does nothing from the first command to sleep until its last member is awake. One that
    was idle when it was put to sleep misses nothing until it would have worked again; then its user
    comes back, and it is `touched`."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self.touched: list[str] = []  # jobs, for the next step

    def uses(self, node: SimNode) -> tuple[Uses, ...]:
        attempts = self._cluster.attempts
        return tuple(
            Uses(ref, gpu_mb(node.spec, attempts[ref.job], ref.member))
            for ref in node.book.alive
            if ref.job in attempts and attempts[ref.job].number == ref.attempt
        )

    def take(self, node: SimNode, command: Sleep | Wake) -> None:
        ref, cluster = command.ref, self._cluster
        attempt = cluster.attempts[ref.job]
        moved_mb = gpu_mb(node.spec, attempt, ref.member) if node.spec.sleep == "cuda" else 0
        if type(command) is Sleep:
            if attempt.doze_ms < 0 and not attempt.idle:
                attempt.doze_ms = cluster.now_ms
            attempt.down += 1
            node.idle.pop(ref, None)
            took_ms = LOCK_MS + moved_mb * 1000 // SLEEP_MB_S
            cluster.at(cluster.now_ms + took_ms, self._slept, (node, ref, moved_mb, took_ms))
        else:
            took_ms = LOCK_MS + moved_mb * 1000 // WAKE_MB_S
            cluster.at(cluster.now_ms + took_ms, self._awoke, (node, ref, attempt, took_ms))

    def _slept(self, subject: tuple[SimNode, MemberRef, int, int]) -> None:
        node, ref, moved_mb, took_ms = subject
        if ref in node.book.dozing:  # else it ended first
            node.book.slept(ref, moved_mb, took_ms)
            self._cluster.reports(node.spec.id)

    def _awoke(self, subject: tuple[SimNode, MemberRef, Attempt, int]) -> None:
        node, ref, attempt, took_ms = subject
        if ref not in node.book.waking:
            return
        node.book.awoke(ref, took_ms)
        self._cluster.reports(node.spec.id)
        attempt.down -= 1
        if attempt.idle:
            node.idle[ref] = self._cluster.now_ms
        if attempt.down:
            return
        if attempt.doze_ms >= 0:
            attempt.begin_ms += self._cluster.now_ms - attempt.doze_ms
            attempt.doze_ms = -1
        late, attempt.late = attempt.late, []
        for offset_ms, happen in late:
            self._cluster.in_its_run(attempt, offset_ms, happen)

    def missed(self, attempt: Attempt) -> None:
        """The time has come for something that the sleeper can only do awake."""
        if attempt.doze_ms < 0:
            attempt.doze_ms = self._cluster.now_ms
            self.touched.append(attempt.job)
