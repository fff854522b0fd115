"""Takes submissions: what the sender may ask for, and what has to be there first."""

from __future__ import annotations

import msgspec

from shoal.api.packages import note_package, refuse_unknown_package
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach, scoped_key
from shoal.api.secrets import refuse_unknown_secrets
from shoal.control.filedesk import FileDesk
from shoal.model.job import JobSpec
from shoal.model.neighbor import handed_here
from shoal.model.report import Answer, Submit
from shoal.model.views import Submissions, Submitted


async def entered_all(reach: Reach, data: Submissions) -> list[Submitted]:
    """Submit the jobs in one step; what became of each."""
    answers: list[Submitted | None] = []
    wanted: list[Submit] = []
    known: set[tuple[str, str]] = set()  # packages with their tenants
    for index, asked in enumerate(data.specs):
        try:
            spec = reach.spec(asked)
            if (spec.package, spec.tenant) not in known:
                refuse_unknown_package(reach, spec.package)
                known.add((spec.package, spec.tenant))
            refuse_unknown_secrets(reach.loop, spec)
        except Refusal as refusal:
            answers.append(Submitted(problem=refusal.problem, status=refusal.status))
            continue
        key = scoped_key(reach, spec, f"{data.key}.{index}" if data.key else "")
        wanted.append(Submit(spec, key, reach.tenant))
        answers.append(None)
    given = iter(await reach.loop.request_all(wanted) if wanted else ())
    await reach.loop.settled()
    for package, tenant in known:
        note_package(reach, package, tenant)
    return [_submitted(next(given)) if one is None else one for one in answers]


def _submitted(answer: Answer) -> Submitted:
    try:
        return Submitted(id=accepted(answer).id)
    except Refusal as refusal:
        return Submitted(problem=refusal.problem, status=refusal.status)


async def entered(
    reach: Reach,
    asked: JobSpec,
    key: str,
    instead: str = "",
    *,
    until_ms: int = 0,
    cancelled: bool = False,
) -> str:
    """Submit the job; its id. `instead`: a waiting job in whose place it comes. `cancelled`: it is
    not to run, whether it has come before or comes now."""
    spec = reach.spec(asked)
    if not cancelled:
        refuse_unknown_package(reach, spec.package)
        refuse_unknown_secrets(reach.loop, spec)
    wanted = Submit(
        spec,
        scoped_key(reach, spec, key),
        reach.tenant,
        instead,
        until_ms=until_ms,
        cancelled=cancelled,
        who=reach.name,
    )
    answer = accepted(await reach.loop.request(wanted))
    await reach.loop.settled()
    if not cancelled:
        note_package(reach, spec.package, spec.tenant)
        await _adopt_work(reach, spec, str(answer.id))
    return str(answer.id)


async def _adopt_work(reach: Reach, spec: JobSpec, job: str) -> None:
    desk = reach.loop.files
    if handed_here(spec) and isinstance(desk, FileDesk):
        problem = await desk.adopt(job, spec)
        if problem:
            raise Refusal(507, problem)  # whoever sent it asks again


def on_its_own(spec: JobSpec) -> JobSpec:
    """Submitted again, it is not a part of what it was submitted with."""
    return msgspec.structs.replace(
        spec, after=(), begin_ms=0, workflow="", schedule="", scheduled_ms=0
    )
