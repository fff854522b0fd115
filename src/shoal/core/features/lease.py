"""Leases: until when a job may be alive unless somebody renews that (docs/leases.md).

The controller stops a job whose lease is over, and so does each of its nodes, alone and somewhat
earlier: a job whose head is dead or cut off has ended by then, too.
"""

from __future__ import annotations

from shoal.core.features.array import no_live_job
from shoal.core.state.ending import cancel, stop
from shoal.core.state.events.queue import JobLeased
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.commands import Lease, Renew
from shoal.model.durations import DAY_MS, SECOND_MS, duration_text, moment_text
from shoal.model.job import Job, JobSpec, MemberRef, Phase, StopCause
from shoal.model.neighbor import asks
from shoal.model.node import NodeHealth
from shoal.model.report import Accepted, Answer, NodeReport, Refused, RenewLease

LEASE_MS_MAX = 7 * DAY_MS
# A node ends members this much before their lease is over: it looks once a second, and its clock
# may be slower than the cluster's by less than a part in DRIFT.
MARGIN_MS = SECOND_MS
DRIFT = 1_000
OVER = "the lease is over"


def lease_problem(round_: Round, spec: JobSpec, until_ms: int) -> Refused | None:
    """Why no such job can have this lease."""
    if spec.sweep is not None:
        return Refused("until_ms", "is for single jobs; submit each element of the array")
    if asks(spec.cluster):
        return Refused("until_ms", "is for jobs that run here; for neighbors, use if_cut")
    heard, nodes = round_.state.heard, round_.state.nodes
    for node in heard.said:
        if node not in heard.leasing and nodes[node].health is not NodeHealth.LOST:
            fix = "upgrade it, or remove it"
            return Refused("until_ms", f"{node} runs an older Shoal that ends no leases; {fix}")
    return _bounds_problem(round_, until_ms)


def _bounds_problem(round_: Round, until_ms: int) -> Refused | None:
    if until_ms <= round_.now_ms:
        return Refused("until_ms", f"{OVER}: it ended at {moment_text(until_ms)}")
    if until_ms > (most_ms := round_.now_ms + LEASE_MS_MAX):
        days = duration_text(LEASE_MS_MAX)
        return Refused("until_ms", f"is more than {days} ahead; at most {moment_text(most_ms)}")
    return None


def renew(round_: Round, request: RenewLease) -> Answer:
    job = round_.state.live(request.job)
    if job is None:
        return no_live_job(round_.state, request.job)
    if not job.until_ms:
        return Refused("job", f"{job.id} has no lease; a job gets one when it is submitted")
    if job.until_ms <= round_.now_ms or (job.stop_cause is not None and job.stop_cause.final):
        return Refused("until_ms", f"{OVER}: {job.id} is ending")
    if request.until_ms <= job.until_ms:
        return Accepted(job.id, f"its lease lasts until {moment_text(job.until_ms)} already")
    if (problem := _bounds_problem(round_, request.until_ms)) is not None:
        return problem
    event = JobLeased(at_ms=round_.now_ms, job=job.id, until_ms=request.until_ms, who=request.who)
    round_.emit(event)
    return Accepted(job.id)


def end_leases(round_: Round) -> None:
    """The phase: a job that waits ends at once, others are stopped and do not run again."""
    state = round_.state
    while state.leases and state.leases[0][0] <= round_.now_ms:
        job = state.jobs[state.leases[0][1]]
        cancel(round_, job, _over_text(job), StopCause.LEASE)


def lease_ended(round_: Round, job: Job, lease_ms: int) -> None:
    """A node has stopped a member of it, because this lease was over by the node's own clock."""
    if job.until_ms <= lease_ms and job.phase is not Phase.STOPPING:
        stop(round_, job, StopCause.LEASE, _over_text(job))


def _over_text(job: Job) -> str:
    return f"its lease ended at {moment_text(job.until_ms)}, and nobody has renewed it"


def lease_note(job: Job, now_ms: int) -> str:
    """For whoever asks why it waits, or how it is."""
    if not job.until_ms or job.phase in (Phase.STOPPING, Phase.FINISHED):
        return ""
    left = duration_text(job.until_ms - now_ms)
    return f"its lease ends in {left}, unless it is renewed"


# What its nodes have to know.


def lease_of(state: State, job: Job, node: str) -> Lease | None:
    """As a command to this node. None: the node does not end leases, or was not heard since this
    controller started; then it gets its commands when it reports."""
    heard_ms = state.heard.leasing.get(node)
    incarnation, sequence = state.heard.said.get(node, (0, 0))
    if heard_ms is None or incarnation != state.nodes[node].incarnation:
        return None
    for_ms = job.until_ms - heard_ms
    return Lease(job.until_ms, sequence, for_ms - MARGIN_MS - max(0, for_ms) // DRIFT)


def renewals(round_: Round, inventories: list[NodeReport]) -> list[Renew]:
    """For the members of jobs that were renewed in this step, and for those whose nodes have just
    shown that they do not know of it."""
    state, wanted = round_.state, dict[tuple[str, MemberRef], Job]()
    placed = {event.job for event in round_.events if isinstance(event, JobPlaced)}
    for event in round_.events:
        job = state.jobs.get(event.job) if isinstance(event, JobLeased) else None
        if job is None or job.id in placed or not job.active:
            continue
        for number, member in enumerate(job.members):
            if not member.over:
                wanted[member.slice.node, MemberRef(job.id, job.attempt, number)] = job
    for inventory in inventories:
        known = {one.ref: one.until_ms for one in inventory.leases or ()}
        here = state.placed[inventory.spec.id]
        for ref, until_ms in known.items():
            if ref in here and until_ms < here[ref].until_ms:
                wanted[inventory.spec.id, ref] = here[ref]
    return [
        Renew(node=node, incarnation=state.nodes[node].incarnation, ref=ref, lease=lease)
        for (node, ref), job in wanted.items()
        if job.phase is not Phase.STOPPING and (lease := lease_of(state, job, node)) is not None
    ]


# -- what always holds, in code that shares nothing with the code above ----------------------------


def lease_violation(state: State) -> str:
    """Each lease is waited for, and the first in line is one that has to end."""
    due = set(state.leases)
    for job in state.jobs.values():
        ends = job.stop_cause is not None and job.stop_cause.final
        if job.until_ms and not ends and (job.until_ms, job.id, 0) not in due:
            return f"nobody waits for the end of the lease of {job.id}"
    if state.leases:
        until_ms, first, _ = state.leases[0]
        if first not in state.jobs or state.jobs[first].until_ms != until_ms:
            return f"the first lease to end is one of {first}, which does not have it"
    return ""
