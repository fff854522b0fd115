"""The API of sessions: a user who may cancel a job may also enter it (ADR 48).

The sender holds a meeting open; the member's node is told to enter it. The head keeps nothing of a
session but the meeting, so after a restart both ends meet again without it.
"""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request

from shoal.api.audit import note
from shoal.api.handling import handles
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach
from shoal.calls.jobs import JobCalls
from shoal.core.answers.why import explain
from shoal.model.job import COMMAND_BYTES_MAX, Job, Member, MemberRef, MemberStatus, Phase
from shoal.model.report import WakeJob
from shoal.model.session import Kind, SessionOrder, SessionRequest, SessionView

INVITE = "invite"  # in the app's state: how a node is told
CONFLICT, LATER = 409, 503
LATER_S = 1
TOUCHES = {
    Kind.EXEC: "ran shoal exec",
    Kind.ATTACH: "attached to it",
    Kind.FORWARD: "forwards a port of it",
    Kind.SSH: "connected with ssh",
}


class Sessions(Controller):
    @handles(JobCalls.open_session)
    async def open(
        self, request: Request[Any, Any, Any], reach: Reach, job_id: str, data: SessionRequest
    ) -> SessionView:
        job = reach.job(job_id)
        note(request.scope, on=f"{job.id}.{data.member} {data.kind.value}")
        member = _living(reach, job, data.member)
        if job.napping:
            return await _woken(reach, job, data)
        if sum(map(len, data.command)) > COMMAND_BYTES_MAX:
            raise Refusal(422, f"is longer than {COMMAND_BYTES_MAX} bytes", "command")
        ref = MemberRef(job.id, job.attempt, data.member)
        invite = request.app.state.get(INVITE)
        order = SessionOrder(ref=ref, request=data, who=reach.who.user)
        node = member.slice.node
        if invite is None or not invite(node, order):
            message = f"{node}, where {job.id} runs, has no contact with the head now; try again"
            raise Refusal(LATER, message, "job", LATER_S)
        return SessionView(job=job.id, attempt=job.attempt, member=data.member, node=node)


async def _woken(reach: Reach, job: Job, asked: SessionRequest) -> SessionView:
    """A session needs its job awake: the client asks again until it is."""
    why = f"is to wake, because {reach.name} {TOUCHES[asked.kind]}"
    accepted(await reach.loop.request(WakeJob(job.id, reach.name, why)))
    await reach.loop.settled()
    job = reach.job(job.id)
    _living(reach, job, asked.member)
    return SessionView(
        job=job.id,
        attempt=job.attempt,
        member=asked.member,
        node=job.members[asked.member].slice.node,
        waking=job.state,
        why=_why(reach, job),
    )


def _why(reach: Reach, job: Job) -> str:
    loop = reach.loop
    return reach.text(explain(loop.state, job, loop.policy, loop.clock.now_ms()))


def _living(reach: Reach, job: Job, number: int) -> Member:
    if job.phase is Phase.FINISHED:
        message = f"{job.id} has ended ({job.state}); read its output with: shoal logs"
        raise Refusal(CONFLICT, f"{message} {job.id}", "job")
    last = max(job.spec.members, job.spec.members_max) - 1
    if number > last:
        raise Refusal(422, f"{job.id} has members 0 to {last}", "member")
    if number < len(job.members):
        member = job.members[number]
        if member.status is MemberStatus.ALIVE:
            return member
        if job.active and member.over:
            message = f"member {number} of {job.id} has ended; read its output with: shoal logs"
            raise Refusal(CONFLICT, f"{message} {job.id} -m {number}", "job")
    why = _why(reach, job)
    message = f"{job.id} does not run yet, it is {job.state}"
    raise Refusal(CONFLICT, f"{message}: {why}" if why else message, "job")
