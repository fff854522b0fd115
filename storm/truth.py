"""What really happened in a world, against what the log says and the design promises.

It sees processes, power switches and committed events, never the controller's state, so that
an error there cannot hide itself here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from shoal.core.nodebook import STOPPED_BEFORE_START_CODE
from shoal.core.phases.observe import FENCE_MS
from shoal.core.state.events.base import EventBase
from shoal.core.state.events.budgets import BudgetFreed, BudgetHeld, BudgetWarned
from shoal.core.state.events.cluster import ControllerStarted, PolicyChanged
from shoal.core.state.events.identity import TenantAdded, TenantRemoved
from shoal.core.state.events.log import Event
from shoal.core.state.events.neighbors import JobHanded, JobReturned
from shoal.core.state.events.nodes import (
    NodeIntended,
    NodeJoined,
    NodeJudged,
    NodeLost,
    NodeReady,
    NodeSilent,
)
from shoal.core.state.events.queue import JobClaimed, JobSubmitted, JobUnclaimed
from shoal.core.state.events.runs import (
    JobAdopted,
    JobCheckpointed,
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobStopping,
    MemberExited,
    MemberLost,
)
from shoal.core.state.events.sleep import JobDozing, JobWaking
from shoal.model.commands import Envelope, Launch
from shoal.model.health import Standing
from shoal.model.job import Fault, MemberRef, Outcome, StopCause
from shoal.model.node import NodeIntent, NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Answer, Cancel, NodeReport, Request, Still, Submit
from storm.aftertruth import AfterTruth
from storm.arraytruth import ArrayTruth
from storm.budgettruth import BudgetTruth
from storm.captruth import CapTruth
from storm.contacts import Contacts
from storm.endtruth import EndTruth
from storm.fabrictruth import FabricTruth
from storm.fairness import Entitlements, stands_alone, wishes_kept
from storm.healthtruth import HealthTruth
from storm.jobtruth import JobTruth, must_fit
from storm.leasetruth import LeaseTruth
from storm.lives import Lives, Untruth
from storm.servicetruth import ServiceTruth
from storm.sleeptruth import SleepTruth
from storm.supplytruth import SupplyTruth
from storm.timeline import Timeline
from storm.waittruth import WaitTruth
from storm.witness import End, Witness


class Truth(Witness):
    """Raises `Untruth` at the moment a promise is broken."""

    def __init__(self, timeline: Timeline, policy: Policy) -> None:
        self.lives = Lives()
        self.services = ServiceTruth(self.lives)
        self.budgets = BudgetTruth(policy)
        self.after, self._waits, self.arrays = AfterTruth(), WaitTruth(), ArrayTruth()
        self.jobs: dict[str, JobTruth] = {}
        self._caps = CapTruth(policy, self.jobs)
        self.unfinished: dict[str, None] = {}
        self._timeline, self._policy, self.fabric = timeline, policy, FabricTruth(policy)
        self._keys: dict[str, str] = {}
        self._keyed: dict[str, str] = {}  # the other way round
        self._cancels: dict[str, None] = {}
        self._cancelled_keys = self._caps.never_run
        self.away: dict[str, JobHanded] = {}  # jobs that other clusters have
        self.may_end_away: Callable[[JobHanded, JobFinished], None] = _nobody_has_it
        self._asked_keys: Counter[str] = Counter()
        self._withdrawn: set[str] = set()  # keys whose only client left before a step saw them
        self._uids: dict[str, int] = {}  # of tenants that were added; 0: removed again
        self._apart: dict[str, int] = {}  # job -> the Unix user it must run as
        self._epoch = 0
        self._on: dict[str, int] = {}  # node -> its incarnation, for those that are on
        self._specs: dict[str, NodeSpec] = {}
        self._contacts = Contacts()
        self._draining: dict[str, bool] = {}
        self._removed: set[str] = set()
        self._known: dict[str, NodeSpec] = {}  # as the nodes joined: what the log knows of them
        self._entitlements = Entitlements(policy, self.jobs)
        self.health, self.ends = HealthTruth(self.jobs, policy), EndTruth(self.jobs, policy)
        self.fences = False  # the engine can end nodes that do not answer
        self._refused: dict[MemberRef, Fault] = {}  # their nodes could not start them
        self.supply = SupplyTruth(timeline, policy, self.lives, self.jobs, self._contacts)
        self.sleep = SleepTruth(timeline, policy, self.lives, self.jobs, self._specs)
        self.sleep.known = self._known
        self.leases = LeaseTruth(timeline, self.lives, self._on)

    # -- what the world shows --------------------------------------------------------------

    def booted(self, spec: NodeSpec, incarnation: int) -> None:
        self._on[spec.id] = incarnation
        self._specs[spec.id] = spec

    def powered_off(self, node: str) -> None:
        del self._on[node]

    def started(self, node: str, launch: Launch) -> None:
        if (job := self.jobs.get(launch.ref.job)) is None:
            raise Untruth(f"{launch.ref} was started, but its job is not in the log")
        job.member_may_start(node, launch)
        if launch.uid != self._apart.get(launch.ref.job, launch.uid):
            raise Untruth(f"{launch.ref} of {launch.tenant} was started as user {launch.uid}")
        self.lives.start(node, launch, job.given_up, self._timeline.now_ms)
        must_fit(self._specs[node], self.lives.on_node(node), self.jobs)

    def ended(self, ref: MemberRef, code: int | None, how: End) -> None:
        self.lives.end(ref, code, how)
        self.jobs[ref.job].member_ended(ref, code, how)

    def could_not_start(self, ref: MemberRef, fault: Fault) -> None:
        self._refused[ref] = fault

    def stop_arrived(self, ref: MemberRef) -> None:
        self.lives.all[ref].stopped = True

    def lapses(self, ref: MemberRef, until_ms: int) -> None:
        self.leases.lapses(ref.job, until_ms)

    def hangs(self, ref: MemberRef) -> None:
        self.health.hung.add((ref.job, ref.attempt))

    def asked(self, request: Request) -> None:
        if isinstance(request, Cancel):
            self._cancels[request.job] = None
        if isinstance(request, Submit):
            self._asked_keys[request.key] += 1
            if request.cancelled:
                self._cancelled_keys[request.key] = None
            self._withdrawn.discard(request.key)
        self.services.asked(request)
        self.after.asked(request)
        self.arrays.asked(request)
        self.sleep.asked(request)

    def withdrawn(self, request: Request) -> None:
        if isinstance(request, Submit) and self._asked_keys[request.key] == 1:
            self._withdrawn.add(request.key)

    def answered(self, request: Request, answer: Answer) -> None:
        accepted = answer.id if isinstance(answer, Accepted) else ""
        known = accepted in self.jobs or accepted in self.arrays.known
        if accepted and isinstance(request, Submit) and not known:
            raise Untruth(f"{accepted} was accepted, but it is not in the log")

    def sent(self, envelope: Envelope) -> None:
        if envelope.epoch != self._epoch:
            raise Untruth(f"commands were sent in epoch {envelope.epoch}, not {self._epoch}")

    def started_over(self) -> None:
        self._contacts.start_over()

    def still(self, still: Still) -> None:
        self._contacts.still(still, self._timeline.now_ms)

    def heard(self, report: NodeReport) -> None:
        if self._contacts.heard(report, self._timeline.now_ms):
            self.health.heard(report, self._timeline.now_ms)

    def stored(self, reports: Sequence[NodeReport]) -> None:
        self._contacts.stored(report.spec.id for report in reports)

    def committed(self, events: Sequence[Event]) -> None:
        self._removed = {  # an operator took them away: nobody has looked at their disks
            event.node
            for event in events
            if isinstance(event, NodeIntended) and event.intent is NodeIntent.REMOVED
        }
        for event in events:
            judge = JUDGES.get(type(event))
            if judge is not None:
                judge(self, event)
            for other in (self.services, self._caps, self.ends, self.supply, self.after):
                other.see(event)
            for one in (self._waits, self.arrays, self.sleep, self.fabric, self.leases):
                one.see(event)
        if not any(isinstance(event, ControllerStarted) for event in events):
            self._contacts.news = set()  # an epoch is stored before the inbox is looked at
        self.ends.done(events)
        self.after.done(events)
        self._entitlements.done()

    # -- what the log says -----------------------------------------------------------------

    def _controller_started(self, event: ControllerStarted) -> None:
        if event.epoch <= self._epoch:
            raise Untruth(f"epoch {event.epoch} began after epoch {self._epoch}")
        self._epoch = event.epoch
        self._contacts.began(event.at_ms)

    def _job_submitted(self, event: JobSubmitted) -> None:
        again = self.jobs.get(event.job) if event.spec.array else None
        if again is None and (event.job in self.jobs or (event.key and event.key in self._keys)):
            raise Untruth(f"{event.job} was submitted twice")
        if event.key in self._withdrawn:
            raise Untruth(f"{event.job} was submitted by a client that had left before")
        self._keys[event.key] = event.job
        self._keyed[event.job] = event.key
        self.jobs[event.job] = again or JobTruth(event.job, event.spec)
        if again is not None:
            again.again(self.arrays.known[event.spec.array].base)
            self.health.starts_over(event.job)
        self.unfinished[event.job] = None
        if event.spec.tenant in self._uids:
            self._apart[event.job] = self._uids[event.spec.tenant]
            if not self._apart[event.job]:
                raise Untruth(f"{event.job} is of {event.spec.tenant}, which was removed")

    def _tenant_removed(self, event: TenantRemoved) -> None:
        self._uids[event.tenant] = 0
        for job_id in self.unfinished:
            if self.jobs[job_id].spec.tenant == event.tenant:
                raise Untruth(f"{event.tenant} was removed, but {job_id} has not ended")

    def _policy_changed(self, event: PolicyChanged) -> None:
        self._policy = self.budgets.policy = self._entitlements.policy = self.health.policy = (
            event.policy
        )

    def _job_placed(self, event: JobPlaced) -> None:
        job = self.jobs[event.job]
        job.placed(event)
        self.budgets.placed(event.job, job.spec)
        wishes_kept(event, job.spec, self.fabric.as_placed(self._known))
        self._alone(job)
        self.health.placed(event)
        self._entitlements.settled(event.job)

    def _job_handed(self, event: JobHanded) -> None:
        self.jobs[event.job].handed(event)
        self.away[event.job] = event
        self._entitlements.settled(event.job)

    def _job_returned(self, event: JobReturned) -> None:
        del self.away[event.job]

    def _alone(self, job: JobTruth) -> None:
        stands_alone(job.id, job.held, job.spec, map(self.jobs.__getitem__, self.unfinished))

    def _job_waking(self, event: JobWaking) -> None:
        self._entitlements.settled(event.job)
        self._alone(self.jobs[event.job])

    def _job_stopping(self, event: JobStopping) -> None:
        self.health.stopping(event)
        self._entitlements.stopping(event)
        job = self.jobs[event.job]
        if event.cause is StopCause.IDLE:
            lives = [self.lives.all.get(ref) for ref in job.refs(event.attempt)]
            job.must_be_idle(event, lives, self._policy.idle_reclaim_ms)
        if event.cause is StopCause.HALVING:
            self.arrays.must_be_halted(event)
            job.stopped_early.add(event.attempt)
        self.budgets.stopping(event, job.spec)
        if job.spec.service and event.cause is StopCause.FAILURE:
            job.found_broken(event.attempt)

    def _job_claimed(self, event: JobClaimed) -> None:
        self.health.claimed(event)
        self._entitlements.claimed(event)

    def _job_unclaimed(self, event: JobUnclaimed) -> None:
        self.budgets.unclaimed(event.job)
        self._entitlements.settled(event.job)

    def _job_running(self, event: JobRunning) -> None:
        for ref in self.jobs[event.job].refs(event.attempt):
            if ref not in self.lives.all:
                raise Untruth(f"{event.job} is said to run, but {ref} was never started")

    def _member_exited(self, event: MemberExited) -> None:
        life = self.lives.all.get(ref := MemberRef(event.job, event.attempt, event.member))
        if life is None or life.how is not End.VANISHED:  # nobody knows any more what it did
            self.health.exited(event)
        self.jobs[event.job].member_over(ref)
        if ref in self._refused and (life is None or life.how is End.VANISHED):
            # What is missing everywhere is the job's failure; a sick node never is.
            if self._refused[ref] is Fault.MISSING:
                self.jobs[event.job].found_broken(event.attempt)
            return
        if event.code:
            self.jobs[event.job].member_failed(event.attempt, event.code, event.step)
        if life is None or life.how is End.VANISHED:
            if event.code != STOPPED_BEFORE_START_CODE:
                raise Untruth(f"{ref} is said to have exited, but it was never seen to")
        elif life.how is None or (life.node, life.code) != (event.node, event.code):
            raise Untruth(f"{ref} is said to have exited {event.code}, but {life}")

    def _member_lost(self, event: MemberLost) -> None:
        life = self.lives.all.get(ref := MemberRef(event.job, event.attempt, event.member))
        self.jobs[event.job].member_over(ref, lost=True)
        if event.fault is not self._refused.get(ref, Fault.NONE) and event.fault:
            raise Untruth(f"{ref} is said to have found no start on {event.node}: {event.why}")
        if event.fault:
            self.jobs[event.job].faulted.add(event.attempt)
        if life is None or (life.stopped and self.leases.has_lapsed(event.job)):
            return  # its node had told it to end, so how it ended is no result
        if life.how not in (End.VANISHED, End.STOPPED, End.LOST):
            raise Untruth(f"{ref} is said to be lost, but {life}")

    def _job_requeued(self, event: JobRequeued) -> None:
        self._must_be_over(event.job, event.attempt)
        job = self.jobs[event.job]
        job.must_not_be_done([self.lives.all.get(ref) for ref in job.refs(event.attempt)])
        job.requeued(event, self._policy)

    def _job_adopted(self, event: JobAdopted) -> None:
        self._entitlements.settled(event.job)
        for ref in self.jobs[event.job].adopted(event):
            life = self.lives.all.get(ref)
            if life is None or life.node != event.node:
                raise Untruth(f"{ref} was adopted, but {life or 'it never started'}")
        if self._draining.get(event.node):
            self.jobs[event.job].node_drained(event.node)

    def _job_finished(self, event: JobFinished) -> None:
        if (handed := self.away.pop(event.job, None)) is not None:
            self.may_end_away(handed, event)
            self.unfinished.pop(event.job, None)
            self.jobs[event.job].outcome = event.outcome
            return
        self._must_be_over(event.job, event.attempt)
        lives = [self.lives.all.get(ref) for ref in self.jobs[event.job].refs(event.attempt)]
        # What a service wants of its replicas is judged by `services`.
        asked = event.job in self._cancels or self._keyed.get(event.job, "") in self._cancelled_keys
        asked = asked or bool(self.jobs[event.job].spec.service)
        asked = asked or self.after.may_be_cancelled(event.job) or self.arrays.cancelled(event.job)
        asked = asked or self.leases.may_be_cancelled(event)
        self.unfinished.pop(event.job, None)
        self._entitlements.settled(event.job)
        if event.outcome is not Outcome.SUCCEEDED:
            self.jobs[event.job].must_not_be_done(lives)
        self.jobs[event.job].finished(event, lives, self._policy, cancel_asked=asked)

    def _must_be_over(self, job_id: str, attempt: int) -> None:
        """An attempt is over when no member lives, except on nodes that were given up."""
        job = self.jobs[job_id]
        for ref, life in self.lives.of_job(job_id):
            if ref.attempt == attempt and ref not in job.given_up:
                raise Untruth(f"attempt {attempt} of {job_id} is said to be over, but {life}")

    def _node_joined(self, event: NodeJoined) -> None:
        """Only a report that was not heard before may bring a node back."""
        if (event.node, event.incarnation) not in self._contacts.news:
            raise Untruth(f"{event.node} is said to be heard again, but only old news came")
        self._known[event.node] = event.spec
        self.health.joined(event.node)

    def _node_judged(self, event: NodeJudged) -> None:
        self.health.judged(event)
        if event.record.standing is Standing.QUARANTINED:
            self._entitlements.node_closed(event.node)

    def _node_lost(self, event: NodeLost) -> None:
        if event.dead:
            if self._on.get(event.node, 0) == event.incarnation:
                raise Untruth(f"{event.node} is said to be dead, but it is on")
        else:
            silent_ms = self._contacts.silent_ms(event.node, event.at_ms)
            ended = self.fences and not self._known[event.node].origin
            if silent_ms < self._policy.grace_ms + (FENCE_MS if ended else 0):
                raise Untruth(f"{event.node} was given up after only {silent_ms} ms of silence")
        for job_id in self.unfinished:
            if event.dead and event.node not in self._removed:
                self._must_not_be_done(job_id, event)
            self.jobs[job_id].node_lost(event.node, dead=event.dead)
        self._entitlements.node_closed(event.node)
        self.health.node_is(event.node, known=False, ready=False)

    def _must_not_be_done(self, job_id: str, event: NodeLost) -> None:
        """A process that came to its own end is not lost with its node: its exit is on the disk."""
        for ref in self.jobs[job_id].held_on(event.node):
            life = self.lives.all.get(ref)
            if life is not None and life.how is End.OWN:
                raise Untruth(f"{ref} is said to be lost with {event.node}, but {life}")

    def _node_intended(self, event: NodeIntended) -> None:
        self.health.intended(event)
        self._draining[event.node] = event.intent is NodeIntent.DRAINING
        if event.intent is NodeIntent.DRAINING:
            for job_id in self.unfinished:
                self.jobs[job_id].node_drained(event.node)


def _nobody_has_it(_: JobHanded, event: JobFinished) -> None:
    raise Untruth(f"{event.job} has ended at a neighbor, and there is none")


JUDGES: dict[type[EventBase], Callable[[Truth, Any], None]] = {
    **dict.fromkeys(
        (BudgetWarned, BudgetHeld, BudgetFreed), lambda truth, event: truth.budgets.see(event)
    ),
    PolicyChanged: Truth._policy_changed,
    TenantAdded: lambda truth, event: truth._uids.update({event.tenant.name: event.tenant.uid}),
    TenantRemoved: Truth._tenant_removed,
    ControllerStarted: Truth._controller_started,
    JobSubmitted: Truth._job_submitted,
    JobPlaced: Truth._job_placed,
    JobHanded: Truth._job_handed,
    JobReturned: Truth._job_returned,
    JobStopping: Truth._job_stopping,
    JobDozing: lambda truth, event: truth._entitlements.dozing(event),
    JobWaking: Truth._job_waking,
    JobClaimed: Truth._job_claimed,
    JobUnclaimed: Truth._job_unclaimed,
    JobRunning: Truth._job_running,
    MemberExited: Truth._member_exited,
    MemberLost: Truth._member_lost,
    JobRequeued: Truth._job_requeued,
    JobAdopted: Truth._job_adopted,
    JobFinished: Truth._job_finished,
    JobCheckpointed: lambda truth, event: truth.health.checkpointed(event),
    NodeJudged: Truth._node_judged,
    NodeReady: lambda truth, event: truth.health.node_is(event.node, known=True, ready=True),
    NodeSilent: lambda truth, event: truth.health.node_is(event.node, known=True, ready=False),
    NodeJoined: Truth._node_joined,
    NodeLost: Truth._node_lost,
    NodeIntended: Truth._node_intended,
}
