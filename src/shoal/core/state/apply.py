"""The only way state changes: one function per event, and the index upkeep that it implies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shoal.core.health.baseline import learn
from shoal.core.health.failures import Failure, failed, forget, ran_well
from shoal.core.scheduling.score import task_of
from shoal.core.state.accounts import share_of
from shoal.core.state.apply_budget import APPLY_BUDGET, judge_holds
from shoal.core.state.apply_fault import note_fault
from shoal.core.state.apply_service import APPLY_SERVICE, not_served, replica_over
from shoal.core.state.estimates import key_of
from shoal.core.state.records import Reservation
from shoal.core.state.state import Node, State
from shoal.model.events import (
    ControllerStarted,
    Event,
    EventBase,
    JobAdopted,
    JobCheckpointed,
    JobClaimed,
    JobFinished,
    JobPlaced,
    JobPromoted,
    JobRequeued,
    JobReserved,
    JobRunning,
    JobStopping,
    JobSubmitted,
    JobUnclaimed,
    MemberExited,
    MemberLost,
    MembersStarted,
    NodeChecked,
    NodeIntended,
    NodeJoined,
    NodeJudged,
    NodeLost,
    NodeReady,
    NodeSuspected,
    PolicyChanged,
)
from shoal.model.health import Standing
from shoal.model.job import Job, Member, MemberStatus, Outcome, Phase, StopCause
from shoal.model.node import NodeHealth, NodeIntent


def apply(state: State, event: Event) -> None:
    """Change the state by one event; live, replayed and simulated alike."""
    if state.aging and state.aging[0][0] <= event.at_ms:
        state.grow_older(event.at_ms)
    APPLY[type(event)](state, event)


def replay(state: State, events: Iterable[Event]) -> State:
    for event in events:
        apply(state, event)
    return state


def _policy_changed(state: State, event: PolicyChanged) -> None:
    state.obey(event.policy)
    judge_holds(state)  # another tree: other tenants may be held


def _controller_started(state: State, event: ControllerStarted) -> None:
    state.epoch = event.epoch
    state.next_port += event.first_port
    state.next_job = max(state.next_job, event.first_job)
    # Nobody could be heard while no controller listened, so silence counts from now.
    state.contacts = {
        node.id: event.at_ms for node in state.order if node.health is not NodeHealth.LOST
    }
    state.said = {}


def _job_submitted(state: State, event: JobSubmitted) -> None:
    number = state.next_job
    state.next_job += 1
    state.submitted += 1
    state.foresight.saw(task_of(event.spec))
    state.add_job(
        Job(id=event.job, number=number, spec=event.spec, key=event.key, submitted_ms=event.at_ms)
    )


def _job_placed(state: State, event: JobPlaced) -> None:
    job = state.jobs[event.job]
    if job.id in state.claims:
        state.unclaim(job)
    state.queue.remove(job)
    state.forget_reservation(job)
    job.phase = Phase.STARTING
    job.share = share_of(job.spec.demand, event.slices[0].gpu_milli, state.totals)
    job.attempt = event.attempt
    job.members = [Member(slice_) for slice_ in event.slices]
    job.master = event.master
    job.placed_ms = event.at_ms
    job.running_ms = None
    job.stop_cause = None
    job.first_bad_code = None
    job.fault = ""
    job.saved_ms = job.idle_since_ms = None
    job.not_before_ms = 0
    job.why = event.why
    state.next_port += 1
    state.hold(job)
    _account(state, job, len(job.members), event.at_ms, entering=True)
    job.borrowed = not state.accounts.within_quota(job.spec.tenant, 0)


def _job_reserved(state: State, event: JobReserved) -> None:
    nodes = tuple(sorted(state.nodes[node].index for node in event.nodes))
    before = state.reservations.get(event.job)
    promised_ms = event.at_ms if event.start_ms is None else event.start_ms
    if before is not None:
        promised_ms = before.promised_ms
    reservation = Reservation(event.start_ms, nodes, event.at_ms, promised_ms)
    state.reservations[event.job] = reservation
    state.other_gaps()


def _job_claimed(state: State, event: JobClaimed) -> None:
    job = state.jobs[event.job]
    job.why = event.why if job.phase is Phase.WAITING else job.why
    state.claim(job, event.slices)


def _job_unclaimed(state: State, event: JobUnclaimed) -> None:
    state.unclaim(state.jobs[event.job])


def _job_promoted(state: State, event: JobPromoted) -> None:
    job = state.jobs[event.job]
    waits = job.phase is Phase.WAITING and job.id not in state.claims
    if waits:
        state.queue.remove(job)
    job.elder = True
    state.elder = job.id
    state.stoppable.joins(job, state.policy.run_ms_min)  # it is more entitled now
    if waits:
        state.queue.add(job)


def _members_started(state: State, event: MembersStarted) -> None:
    job = state.jobs[event.job]
    for number in event.members:
        job.members[number].status = MemberStatus.ALIVE
        job.members[number].started = True


def _job_running(state: State, event: JobRunning) -> None:
    job = state.jobs[event.job]
    for member in job.members:
        if not member.over:
            member.status = MemberStatus.ALIVE
            member.started = True
    job.phase = Phase.RUNNING
    job.running_ms = event.at_ms
    state.tell(job, job.attained_ms)
    state.watch_limit(job)
    state.watch_age(job)
    state.stoppable.joins(job, state.policy.run_ms_min)


def _member_exited(state: State, event: MemberExited) -> None:
    job = state.jobs[event.job]
    member = job.members[event.member]
    member.status = MemberStatus.EXITED
    member.code, member.stopped = event.code, event.stopped
    if event.code and job.first_bad_code is None:
        job.first_bad_code = event.code
        job.first_bad_member, job.first_bad_step = event.member, event.step
        if job.phase is not Phase.STOPPING:  # else why it is being stopped says more
            job.why = event.why
    _over(state, job, event.member, event.at_ms)


def _member_lost(state: State, event: MemberLost) -> None:
    job = state.jobs[event.job]
    job.members[event.member].status = MemberStatus.LOST
    note_fault(state, job, event)
    _over(state, job, event.member, event.at_ms)


def _over(state: State, job: Job, number: int, at_ms: int) -> None:
    """A member holds nothing any more, and somebody must look at what that means for its job."""
    state.release(job, number)
    _account(state, job, -1, at_ms)
    state.attention[job.id] = None


def _account(state: State, job: Job, members: int, at_ms: int, *, entering: bool = False) -> None:
    gpus = sum(len(member.slice.gpus) * member.slice.gpu_milli for member in job.members[:1])
    penalty = job.share * members * state.policy.entry_penalty_ms if entering else 0
    share = job.share * members
    state.accounts.change(job.spec.tenant, share, gpus * members, at_ms, penalty)


def _job_checkpointed(state: State, event: JobCheckpointed) -> None:
    job = state.jobs[event.job]
    job.saved_step, job.saved_ms = event.step, event.at_ms


def _job_stopping(state: State, event: JobStopping) -> None:
    job = state.jobs[event.job]
    not_served(state, job)
    job.phase = Phase.STOPPING
    job.stop_cause = event.cause
    job.why = event.why
    state.attention[job.id] = None


def _job_requeued(state: State, event: JobRequeued) -> None:
    job = state.jobs[event.job]
    state.let_go(job)
    not_served(state, job)
    if job.running_ms is not None:
        state.tell(job, job.attained_ms + event.at_ms - job.running_ms)
    _wear(state, job, event.at_ms, event.cause in (StopCause.NODE_LOSS, StopCause.HANG))
    job.kept_ms = kept_ms(job, event.cause, event.at_ms)
    job.attained_ms += job.kept_ms
    job.phase = Phase.WAITING
    job.not_before_ms = event.not_before_ms
    job.stop_cause = None
    if event.cause is StopCause.FAILURE:
        job.failures += 1
        _book_failure(state, job, event.at_ms)
    elif event.cause is StopCause.NODE_LOSS:
        job.losses += 1
    elif event.cause is StopCause.HANG:
        job.hangs += 1
    elif event.cause is StopCause.IDLE:
        job.idle_stops += 1
    elif event.cause in (StopCause.PREEMPT, StopCause.RESIZE, StopCause.MOVE):
        job.preemptions += 1
    job.why = event.why
    if job.id not in state.claims:
        state.queue.add(job)


def _wear(state: State, job: Job, at_ms: int, lost: bool) -> None:
    if job.running_ms is not None:
        nodes = len({member.slice.node for member in job.members})
        state.wear.add(nodes * (at_ms - job.running_ms), lost)


def _book_failure(state: State, job: Job, at_ms: int) -> None:
    number = job.first_bad_member
    failed(
        state.failures,
        job.id,
        Failure(
            at_ms=at_ms,
            node=job.members[number].slice.node,
            member=number,
            code=job.first_bad_code or 0,
            step=job.first_bad_step,
        ),
    )


def _job_adopted(state: State, event: JobAdopted) -> None:
    job = state.jobs[event.job]
    if job.id in state.claims:
        state.unclaim(job)
    state.queue.remove(job)
    state.forget_reservation(job)
    for member in job.members:
        member.status = MemberStatus.ALIVE
    state.hold(job)
    _account(state, job, len(job.members), event.at_ms)
    job.borrowed = not state.accounts.within_quota(job.spec.tenant, 0)
    job.attained_ms -= job.kept_ms  # the attempt was not over after all
    job.kept_ms = 0
    job.phase = Phase.RUNNING
    job.not_before_ms = 0
    if job.running_ms is None:
        job.running_ms = event.at_ms
    job.why = event.why
    state.watch_limit(job)
    state.watch_age(job)
    state.stoppable.joins(job, state.policy.run_ms_min)
    state.attention[job.id] = None  # its node may have been set to drain meanwhile


def _job_finished(state: State, event: JobFinished) -> None:
    job = state.jobs[event.job]
    if job.id in state.claims:
        state.unclaim(job)
    if job.phase is Phase.WAITING:
        state.queue.remove(job)
    else:
        state.let_go(job)
    if job.phase is not Phase.WAITING:
        _wear(state, job, event.at_ms, lost=job.stop_cause is StopCause.NODE_LOSS)
    if job.running_ms is not None:
        ran_ms = job.attained_ms + event.at_ms - job.running_ms
        state.tell(job, ran_ms)
        if event.outcome is Outcome.SUCCEEDED:
            state.estimates.ended(key_of(job), ran_ms)
            state.queue.stuck.clear()
            nodes = tuple(dict.fromkeys(member.slice.node for member in job.members))
            ran_well(state.failures, job.id, nodes)
    forget(state.failures, job.id)
    state.ages.add(event.at_ms - job.submitted_ms)
    not_served(state, job)
    replica_over(state, job, event)
    job.phase = Phase.FINISHED
    job.outcome = event.outcome
    job.code = event.code
    job.why = event.why
    job.finished_ms = event.at_ms
    state.finished += 1
    state.drop_job(job)


def _node_joined(state: State, event: NodeJoined) -> None:
    node = state.nodes.get(event.node)
    if node is None:
        node = Node(spec=event.spec, index=len(state.order), incarnation=event.incarnation)
        state.add_node(node)
    elif event.incarnation != node.incarnation:
        state.replace_node(node, event.spec, event.incarnation)
    if node.intent is NodeIntent.REMOVED or node.leaving:
        state.set_intent(node, NodeIntent.OPEN)
        node.leaving = False
    node.dead = False
    _set_health(state, node, NodeHealth.JOINING, event)


def _node_ready(state: State, event: NodeReady) -> None:
    _set_health(state, state.nodes[event.node], NodeHealth.READY, event)


def _node_suspected(state: State, event: NodeSuspected) -> None:
    _set_health(state, state.nodes[event.node], NodeHealth.SUSPECT, event)


def _node_lost(state: State, event: NodeLost) -> None:
    node = state.nodes[event.node]
    _set_health(state, node, NodeHealth.LOST, event)
    node.dead = event.dead
    state.contacts.pop(node.id, None)
    for job_id in [j for j, given in state.claims.items() if any(s.node == node.id for s in given)]:
        state.unclaim(state.jobs[job_id])
    for ref, job in list(state.placed[node.id].items()):
        job.members[ref.member].status = MemberStatus.LOST
        _over(state, job, ref.member, event.at_ms)


def _node_intended(state: State, event: NodeIntended) -> None:
    node = state.nodes[event.node]
    state.close(node)
    state.set_intent(node, event.intent)
    node.leaving = event.leaving
    state.open_up(node)
    if event.intent is NodeIntent.DRAINING:
        for job in state.placed[node.id].values():
            state.attention[job.id] = None


def _node_checked(state: State, event: NodeChecked) -> None:
    if event.passed and not event.result.error:
        learn(state.fleet, event.node, state.nodes[event.node].spec.kind, event.result)


def _node_judged(state: State, event: NodeJudged) -> None:
    node = state.nodes[event.node]
    state.close(node)
    node.record = event.record
    state.open_up(node)
    if node.record.standing is Standing.OK:
        state.troubled.pop(node.id, None)
        return
    state.troubled[node.id] = None
    if node.record.standing is Standing.QUARANTINED:
        for job_id in [j for j, g in state.claims.items() if any(s.node == node.id for s in g)]:
            state.unclaim(state.jobs[job_id])
        for job in state.placed[node.id].values():
            state.attention[job.id] = None


def _set_health(
    state: State,
    node: Node,
    health: NodeHealth,
    event: NodeJoined | NodeReady | NodeSuspected | NodeLost,
) -> None:
    state.close(node)
    node.health = health
    node.since_ms = event.at_ms
    node.why = event.why
    state.open_up(node)


def kept_ms(job: Job, cause: StopCause, at_ms: int) -> int:
    """How much of the attempt's run time survives it. A job that was asked to stop has saved its
    work; one that lost a node goes back to its last checkpoint."""
    if job.running_ms is None or (job.spec.checkpoint_ms == 0 and job.saved_ms is None):
        return 0
    ran_ms = at_ms - job.running_ms
    if cause in (StopCause.NODE_LOSS, StopCause.FAILURE, StopCause.HANG):
        ran_ms -= unsaved_ms(job, at_ms)
    return ran_ms


def unsaved_ms(job: Job, now_ms: int) -> int:
    """What a running job would lose if it fell back to its last checkpoint: by what it told, else
    by how often it says that it saves."""
    if job.running_ms is None:
        return 0
    if job.saved_ms is not None:
        return now_ms - job.saved_ms
    ran_ms = now_ms - job.running_ms
    return ran_ms % job.spec.checkpoint_ms if job.spec.checkpoint_ms else ran_ms


APPLY: dict[type[EventBase], Callable[[State, Any], None]] = {
    PolicyChanged: _policy_changed,
    ControllerStarted: _controller_started,
    JobSubmitted: _job_submitted,
    JobPlaced: _job_placed,
    JobReserved: _job_reserved,
    JobClaimed: _job_claimed,
    JobUnclaimed: _job_unclaimed,
    JobPromoted: _job_promoted,
    MembersStarted: _members_started,
    JobRunning: _job_running,
    MemberExited: _member_exited,
    MemberLost: _member_lost,
    JobCheckpointed: _job_checkpointed,
    JobStopping: _job_stopping,
    JobRequeued: _job_requeued,
    JobAdopted: _job_adopted,
    JobFinished: _job_finished,
    NodeJoined: _node_joined,
    NodeReady: _node_ready,
    NodeSuspected: _node_suspected,
    NodeLost: _node_lost,
    NodeIntended: _node_intended,
    NodeChecked: _node_checked,
    NodeJudged: _node_judged,
    **APPLY_BUDGET,
    **APPLY_SERVICE,
}
