"""The state of the cluster and the indexes that keep a step cheap."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from shoal.core.health.baseline import Fleet
from shoal.core.health.failures import Book
from shoal.core.phases.scale import Meter
from shoal.core.scheduling.fragments import Foresight, Mix
from shoal.core.scheduling.order import ORDERINGS
from shoal.core.scheduling.stoppable import Stoppable
from shoal.core.state.accounts import Accounts
from shoal.core.state.estimates import SPANS, Estimates, begin_ms, key_of, octave, span
from shoal.core.state.queue import Gang, Queue
from shoal.core.state.records import Ages, Reservation, Watch, Wear
from shoal.core.state.room import Division, Domain, Room
from shoal.core.state.snapshot import Node as Node
from shoal.core.state.snapshot import Snapshot as Snapshot
from shoal.model.health import CheckResult, Standing, Verdict
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.policy import Policy, Preempt
from shoal.model.resources import Kind, Slice
from shoal.model.service import Service, ServiceLoad

if TYPE_CHECKING:
    from shoal.core.phases.reconcile import GangView

ELDER_FACTOR = 16


class State:
    """Owned by one loop. Only `apply` changes it, but for `contacts` and `said`,
    what the controller has heard since it started: not logged, and built anew by hearing."""

    def __init__(self) -> None:
        self.epoch = self.next_port = 0
        self.next_job = 1
        self.submitted = self.finished = 0
        self.drift_ms = 0  # how far the machine's clock was ahead of ours when that was last told
        self.jobs: dict[str, Job] = {}  # live ones only: finished jobs live in the store
        self.nodes: dict[str, Node] = {}
        self.policy = Policy()
        self.accounts: Accounts = Accounts(self.policy)
        self.estimates = Estimates()
        self.ages = Ages()
        self.wear = Wear()
        self.foresight = Foresight(1000)  # for the largest node; what jobs it has seen
        self.reservations: dict[str, Reservation] = {}  # of blocked jobs
        self.failures = Book()  # by their own error, to tell bad nodes from bad jobs
        self.fleet = Fleet()  # what nodes usually measure
        self.services: dict[str, Service] = {}
        self.claims: dict[str, tuple[Slice, ...]] = {}  # of jobs that others are stopped for

        # Indexes: all derived from the above.
        self.order: list[Node] = []  # nodes by index
        self.rooms: list[Room] = []  # by node index
        self.cluster = Domain()  # all schedulable nodes
        self.divisions = (Division(), Division())  # the blocks, the racks
        self.placed: dict[str, dict[MemberRef, Job]] = {}  # node -> members that hold slices
        self.capacity: dict[Kind, int] = {}  # kind of node -> how many are known
        self.open_capacity: dict[Kind, int] = {}  # ... how many are schedulable
        self.totals = Kind(0, 0, 0)  # of all nodes that are known
        self.queue = Queue()
        self.queue.holds = lambda job: bool(self.accounts.held_by(job.spec.tenant))
        self.numbers: dict[int, str] = {}  # job number -> id
        self.keys: dict[str, str] = {}  # submission key -> job id
        self.masters: set[str] = set()  # rendezvous points in use, "address:port"
        self.limits: list[tuple[int, str, int]] = []  # heap of (deadline_ms, job, attempt)
        self.aging: list[tuple[int, str, int]] = []  # heap of (when its span ends, job, attempt)
        self.elder: str | None = None  # the job that comes first because it waited for too long
        self.births_ms = 0  # the sum over live jobs of when they were submitted
        self.attention: dict[str, None] = {}  # jobs that `heal` must look at
        self.preemptible: dict[str, None] = {}  # jobs that hold slices and may be stopped
        self.stoppable = Stoppable()  # those of them that run, by how entitled they are
        self.elastic: dict[str, None] = {}  # jobs that hold slices and may grow or shrink
        self.looked_ms: dict[str, int] = {}  # when an opening was last sought for a blocked job
        self.moves_ms: dict[str, int] = {}  # when it was last tried to move somebody for it
        self.hopeless: set[Gang] = set()  # known not to fit until a node gains room; a cache
        self.no_gap: set[tuple[Gang, tuple[str, ...]]] = set()  # but on nodes set aside for these
        # When the whole queue should be looked at again, and how many cycles looked at parts of it.
        self.replicas: dict[str, dict[str, None]] = {}  # service -> its jobs
        self.troubled: dict[str, None] = {}  # nodes that are suspect or in quarantine
        self.look_ms: int | None = 0
        self.partial = 0
        self.contacts: dict[str, int] = {}  # when nodes not lost were heard, longest unheard first
        self.watches: dict[str, Watch] = {}  # of jobs whose members tell of their steps
        self.idles: dict[str, tuple[int, dict[int, int]]] = {}  # attempt, members' since when
        self.watch_ms: int | None = None  # when to look whether one of them hangs
        self.loads: dict[str, ServiceLoad] = {}  # what the gateway said last of each service
        self.counters: dict[str, Meter] = {}
        self.down_ms: dict[str, int] = {}  # since when the gateway cannot reach a replica
        self.serve_ms: int | None = None  # when to look at the services again
        self.warm: dict[str, dict[str, int]] = {}  # job -> nodes ready for it, and when heard
        self.getting: dict[str, dict[MemberRef, str]] = {}  # node -> who cannot start yet, and why
        self.asked: dict[str, str] = {}  # node -> the check that somebody wants of it
        self.verdicts: dict[str, tuple[str, CheckResult, Verdict]] = {}  # node -> check, answers
        # The newest (incarnation, sequence) of each node, lost or not: what is older is refused.
        self.said: dict[str, tuple[int, int]] = {}
        # What members of a gang find in their environment, while some of it start; a cache.
        self.gang_views: dict[str, GangView] = {}
        self.obey(self.policy)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            epoch=self.epoch,
            next_job=self.next_job,
            next_port=self.next_port,
            submitted=self.submitted,
            finished=self.finished,
            jobs=list(self.jobs.values()),
            nodes=self.order,
            policy=self.policy,
            accounts=self.accounts.own,
            estimates=self.estimates.groups,
            ages=self.ages,
            wear=self.wear,
            reservations=self.reservations,
            claims=self.claims,
            mix=list(self.foresight.mix.counts.items()),
            failures=self.failures,
            fleet=self.fleet,
            services=list(self.services.values()),
            budgets=self.accounts.budgets,
            drift_ms=self.drift_ms,
        )

    @classmethod
    def restore(cls, snapshot: Snapshot) -> State:
        state = cls()
        state.epoch, state.next_job = snapshot.epoch, snapshot.next_job
        state.next_port, state.drift_ms = snapshot.next_port, snapshot.drift_ms
        state.submitted, state.finished = snapshot.submitted, snapshot.finished
        state.accounts = Accounts(snapshot.policy, snapshot.accounts)
        state.accounts.budgets = snapshot.budgets
        state.estimates = Estimates(snapshot.estimates)
        state.ages, state.wear, state.fleet = snapshot.ages, snapshot.wear, snapshot.fleet
        state.failures, state.reservations = snapshot.failures, snapshot.reservations
        state.services = {service.spec.name: service for service in snapshot.services}
        state.foresight = Foresight(1000, Mix(dict(snapshot.mix)))
        state.obey(snapshot.policy)
        for node in snapshot.nodes:
            state.add_node(node)
        for job in snapshot.jobs:
            state.add_job(job)
        for job_id, slices in snapshot.claims.items():
            state.claim(state.jobs[job_id], slices)
        return state

    # -- index keeping, for apply and restore only ---------------------------------------

    def obey(self, policy: Policy) -> None:
        """From now on; the queue is put into the policy's order if that is another."""
        reorders = policy.order != self.policy.order or not self.jobs
        self.policy = policy
        self.accounts.obey(policy)
        for job in self.jobs.values():
            job.borrowed = job.active and not self.accounts.within_quota(job.spec.tenant, 0)
        if reorders:
            ordering = ORDERINGS[policy.order]
            waiting = [job for job in self.jobs.values() if job.phase is Phase.WAITING]
            unclaimed = [job for job in waiting if job.id not in self.claims]
            self.queue.reorder(ordering.job, lambda job: ordering.kin(self, job), unclaimed)
        self.hopeless = set()
        self.other_gaps()
        self.look_ms = 0
        self.stoppable = Stoppable()
        for job in self.jobs.values():
            self.stoppable.joins(job, self.policy.run_ms_min)

    def add_node(self, node: Node) -> None:
        assert node.index == len(self.order), "nodes are indexed in join order"
        self.nodes[node.id] = node
        self.order.append(node)
        self.rooms.append(Room(node.spec))
        self._foresee(node.spec)
        self.placed[node.id] = {}
        if node.record.standing is not Standing.OK:
            self.troubled[node.id] = None
        self._count_known(node, 1)
        self.open_up(node)

    def replace_node(self, node: Node, spec: NodeSpec, incarnation: int) -> None:
        """The node starts a new life, perhaps with other resources; it must be closed and empty."""
        assert not self.placed[node.id], "a node that rejoins holds nothing"
        self._count_known(node, -1)
        node.spec = spec
        node.incarnation = incarnation
        self._count_known(node, 1)
        self.rooms[node.index] = Room(spec)
        self._foresee(spec)

    def _foresee(self, spec: NodeSpec) -> None:
        if spec.cpu_milli > self.foresight.largest_cpu_milli:
            self.foresight = Foresight(spec.cpu_milli, self.foresight.mix)

    def set_intent(self, node: Node, intent: NodeIntent) -> None:
        self._count_known(node, -1)
        node.intent = intent
        self._count_known(node, 1)

    def _count_known(self, node: Node, change: int) -> None:
        if node.intent is not NodeIntent.REMOVED:
            kind = node.spec.kind
            self.capacity[kind] = self.capacity.get(kind, 0) + change
            self.totals = Kind(
                self.totals.gpus + change * kind.gpus,
                self.totals.cpu_milli + change * kind.cpu_milli,
                self.totals.memory_mb + change * kind.memory_mb,
            )

    def open_up(self, node: Node) -> None:
        """Offer the node to the scheduler if it may be offered."""
        if node.schedulable:
            room = self.rooms[node.index]
            self.cluster.add(node.index, room)
            for division, name in zip(self.divisions, room.domains, strict=False):
                division.add(name, node.index, room)
            self.open_capacity[room.kind] = self.open_capacity.get(room.kind, 0) + 1
            self.gained(room)

    def close(self, node: Node) -> None:
        """Take the node away from the scheduler, before its health or intent changes."""
        if node.schedulable:
            room = self.rooms[node.index]
            self.cluster.remove(node.index, room)
            for division, name in zip(self.divisions, room.domains, strict=False):
                division.remove(name, node.index, room)
            self.open_capacity[room.kind] -= 1

    def gained(self, room: Room) -> None:
        """A node has more room than before: shapes whose members fit on it are worth a try."""
        if self.preemptible and self.policy.preempt is not Preempt.NEVER:
            self.look_ms = 0  # fewer need to be stopped for those in front
        if not self.hopeless and not self.no_gap and not self.queue.stuck:
            return
        known = {lane.gang for lane in self.queue.stuck} | {gang for gang, _ in self.no_gap}
        fits = {gang for gang in known | self.hopeless if room.holds(gang.demand)}
        if fits:
            self.hopeless = self.hopeless - fits
            self.no_gap = {entry for entry in self.no_gap if entry[0] not in fits}
            self.queue.stuck = {
                lane: ahead for lane, ahead in self.queue.stuck.items() if lane.gang not in fits
            }

    def other_gaps(self) -> None:
        """What is set aside has changed: there may be room beside it where there was none."""
        self.no_gap.clear()
        self.queue.stuck.clear()

    def add_job(self, job: Job) -> None:
        self.jobs[job.id] = job
        self.numbers[job.number] = job.id
        self.births_ms += job.submitted_ms
        if job.spec.service:
            self.replicas.setdefault(job.spec.service, {})[job.id] = None
        if job.elder:
            self.elder = job.id
        if job.key:
            self.keys[job.key] = job.id
        if job.phase is Phase.WAITING:
            self.queue.add(job)
        else:
            self.hold(job)
            self.watch_limit(job)
            self.watch_age(job)
            self.stoppable.joins(job, self.policy.run_ms_min)
            self.attention[job.id] = None

    def job_numbered(self, number: int) -> Job:
        return self.jobs[self.numbers[number]]

    def drop_job(self, job: Job) -> None:
        del self.jobs[job.id]
        del self.numbers[job.number]
        self.warm.pop(job.id, None)
        self.births_ms -= job.submitted_ms
        self.down_ms.pop(job.id, None)
        if job.spec.service:
            of_service = self.replicas[job.spec.service]
            del of_service[job.id]
            if not of_service:
                del self.replicas[job.spec.service]
        if self.elder == job.id:
            self.elder = None
        self.attention.pop(job.id, None)
        self.forget_reservation(job)
        if job.key:
            del self.keys[job.key]

    def claim(self, job: Job, slices: tuple[Slice, ...]) -> None:
        """Take what is promised, though some of it is still held, so that nobody else does. A job
        with a claim does not stand in the queue; one being resized may claim less later."""
        if job.id in self.claims:
            self.unclaim(job)
        self.claims[job.id] = slices
        for slice_ in slices:
            self.change(slice_, -1, exclusive=job.spec.whole_nodes)
        if job.phase is Phase.WAITING:
            self.queue.remove(job)

    def unclaim(self, job: Job) -> None:
        for slice_ in self.claims.pop(job.id):
            self.change(slice_, +1, exclusive=job.spec.whole_nodes)
        if job.phase is Phase.WAITING:
            self.queue.add(job)

    def forget_reservation(self, job: Job) -> None:
        if self.reservations.pop(job.id, None) is not None:
            self.other_gaps()
            self.look_ms = 0
        self.looked_ms.pop(job.id, None)
        self.moves_ms.pop(job.id, None)

    def hold(self, job: Job) -> None:
        """The members of a placed job take their slices."""
        for number, member in enumerate(job.members):
            if not member.over:
                self.placed[member.slice.node][MemberRef(job.id, job.attempt, number)] = job
                self.change(member.slice, -1, exclusive=job.spec.whole_nodes)
                left = self.rooms[self.nodes[member.slice.node].index].gpu_milli
                short = min(left, default=0) < 0 and any(left[gpu] < 0 for gpu in member.slice.gpus)
                assert not short, f"{member.slice} is held"
        self.masters.add(job.master)
        if job.spec.yields:
            self.preemptible[job.id] = None
        if job.spec.resizes:
            self.elastic[job.id] = None

    def release(self, job: Job, number: int) -> None:
        """A member is over; its slice is free again."""
        slice_ = job.members[number].slice
        del self.placed[slice_.node][MemberRef(job.id, job.attempt, number)]
        self.change(slice_, +1, exclusive=job.spec.whole_nodes)

    def let_go(self, job: Job) -> None:
        """The attempt is over; nothing of it is held any more."""
        self.stoppable.drop(job.id)
        self.masters.discard(job.master)
        self.watches.pop(job.id, None)
        self.preemptible.pop(job.id, None)
        self.elastic.pop(job.id, None)

    def watch_limit(self, job: Job) -> None:
        if job.spec.time_limit_ms and job.running_ms is not None:
            deadline_ms = job.running_ms + job.spec.time_limit_ms
            heapq.heappush(self.limits, (deadline_ms, job.id, job.attempt))
            if len(self.limits) > 2 * len(self.jobs) + 64:  # most belong to jobs long finished
                self.limits = [entry for entry in self.limits if entry[1] in self.jobs]
                heapq.heapify(self.limits)

    def watch_age(self, job: Job) -> None:
        """A running job enters one span of run time after another: see `grow_older`."""
        if job.phase is not Phase.RUNNING or job.running_ms is None:
            return
        known_ms = max(job.attained_ms, begin_ms(max(0, job.told)))
        if span(known_ms) < SPANS - 4:
            # Once an octave: what it entered meanwhile is told then.
            when_ms = job.running_ms + (4096 << octave(known_ms)) - job.attained_ms
            heapq.heappush(self.aging, (when_ms, job.id, job.attempt))
            if len(self.aging) > 2 * len(self.jobs) + 64:  # most belong to jobs long finished
                self.aging = [entry for entry in self.aging if entry[1] in self.jobs]
                heapq.heapify(self.aging)

    def grow_older(self, now_ms: int) -> None:
        """Learn from running jobs what they have shown by now: that they are not shorter."""
        while self.aging and self.aging[0][0] <= now_ms:
            _, job_id, attempt = heapq.heappop(self.aging)
            job = self.jobs.get(job_id)
            if job is not None and job.attempt == attempt and job.phase is Phase.RUNNING:
                assert job.running_ms is not None, "a running job knows since when"
                self.tell(job, job.attained_ms + now_ms - job.running_ms)
                self.watch_age(job)

    def tell(self, job: Job, ran_ms: int) -> None:
        """It has run for so long, over all attempts; no span is told twice."""
        now, before = span(ran_ms), job.told
        if before < now:
            self.queue.stuck.clear()  # who seemed too long for a gap may seem shorter now
            if before < 0:
                self.estimates.began(key_of(job))
            if now:
                self.estimates.survived(key_of(job), begin_ms(max(0, before)), begin_ms(now))
            job.told = now

    def patience_ms(self, now_ms: int) -> int:
        """How long a job waits before it may come first: in proportion to what jobs are used to,
        so that in an overloaded cluster not everybody is an exception."""
        ages_ms = self.ages.total_ms + len(self.jobs) * now_ms - self.births_ms
        mean_ms = ages_ms // max(1, self.ages.jobs + len(self.jobs))
        return max(self.policy.elder_ms, ELDER_FACTOR * mean_ms)

    def change(self, slice_: Slice, sign: int, *, exclusive: bool = False) -> None:
        """A slice is taken (-1) or given back (+1)."""
        node = self.nodes[slice_.node]
        room = self.rooms[node.index]
        before = room.level
        room.change(slice_, sign, exclusive=exclusive)
        if not node.schedulable:
            return
        if before != (after := room.level):
            self.cluster.move(node.index, room.kind, before, after)
            for division, name in zip(self.divisions, room.domains, strict=False):
                division.move(name, node.index, room.kind, before, after)
        if sign > 0:
            self.gained(room)
