"""Which jobs a request looks for, from its query; and labels and notes, by which they are found."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shoal.api.handling import handles
from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach
from shoal.calls.jobs import JobCalls
from shoal.model.finding import TEXT_CHARACTERS_MAX, JobFilter, LabelsChange, NoteText
from shoal.model.labels import CONDITION_CHARACTERS_MAX
from shoal.model.report import LabelJob, NoteJob, Refused
from shoal.model.views import Done

Word = Annotated[str, Meta(max_length=128)]
Condition = Annotated[str, Meta(max_length=CONDITION_CHARACTERS_MAX)]
Moment = Annotated[int, Meta(ge=0, le=2**53 - 1)]


def provide_wanted(
    user: Word = "",
    tenant: Word = "",
    name: Word = "",
    state: Annotated[str, Meta(max_length=128)] = "",
    label: list[Condition] | None = None,
    since_ms: Moment = 0,
    on_node: Word = "",
    array: Word = "",
    q: Annotated[str, Meta(max_length=TEXT_CHARACTERS_MAX)] = "",
    service: Word = "",
    until_ms: Moment = 0,
) -> JobFilter:
    """`state` may name several, separated by commas; `label` may be given several times. `q`:
    words that the id, name, user, command or labels contain."""
    wanted = JobFilter(
        user=user,
        tenant=tenant,
        name=name,
        states=tuple(one for one in state.split(",") if one),
        labels=tuple(label or ()),
        since_ms=since_ms,
        node=on_node,
        array=array,
        text=q,
        service=service,
        until_ms=until_ms,
    )
    problem = wanted.problem()
    if problem is not None:
        raise Refusal(422, problem[1], problem[0])
    return wanted


class Annotations:
    """Jobs that ended can be labeled and noted, too."""

    @handles(JobCalls.label_job)
    async def label(self, reach: Reach, job_id: str, data: LabelsChange) -> Done:
        reach.job(job_id)
        said = await reach.loop.request(LabelJob(job_id, data.labels, reach.name))
        if isinstance(said, Refused) and said.missing:  # it is in the store
            await reach.loop.settled()
            before = reach.job(job_id).spec.labels
            request = LabelJob(job_id, data.labels, reach.name, ended=True, before=before)
            said = await reach.loop.request(request)
        answer = accepted(said)
        return Done(id=answer.id, note=answer.note)

    @handles(JobCalls.note_job)
    async def note(self, reach: Reach, job_id: str, data: NoteText) -> Done:
        reach.job(job_id)
        text = data.text.strip()
        if any(not one.isprintable() and one not in "\n\t" for one in text):
            raise Refusal(422, "holds characters that cannot be shown; remove them", "text")
        said = await reach.loop.request(NoteJob(job_id, text, reach.name))
        if isinstance(said, Refused) and said.missing:
            said = await reach.loop.request(NoteJob(job_id, text, reach.name, ended=True))
        answer = accepted(said)
        return Done(id=answer.id, note=answer.note)
