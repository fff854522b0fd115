"""A changed request in the place of one that waits: the old job ends and the new one enters in one
step, so that neither a crash nor a repeated request leaves both of them, or none."""

from __future__ import annotations

from shoal.core.features.caps import too_large, too_many
from shoal.core.phases.after import enter, in_vain
from shoal.core.phases.ending import cancel
from shoal.core.state.round import Round
from shoal.core.state.sizes import bytes_of
from shoal.core.state.state import State
from shoal.model.after import conditions
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import Job, Phase
from shoal.model.reason import Reader, job_part, render
from shoal.model.report import Answer, Refused, Submit


def submit_instead(round_: Round, request: Submit) -> Answer:
    """One job takes the place of another that waits, so a full queue has room for it. What others
    count on stays: a job that has started, or that belongs to more than itself."""
    state, spec = round_.state, request.spec
    old = state.live(request.instead)
    if old is None or request.scope not in (EVERY_TENANT, old.spec.tenant):
        return Refused("job", f"there is no live job {request.instead}", missing=True)
    if old.spec.tenant != spec.tenant:
        return Refused("tenant", f"{old.id} is a job of {old.spec.tenant}, and stays one")
    if old.elements is not None or _has_others(state, old):
        what = "others belong to it or wait for it; submit the change as another job"
        return Refused("job", f"{old.id} cannot be replaced: {what}")
    if old.phase is not Phase.WAITING or old.attempt:
        return Refused("job", f"{old.id} has already started; submit the change as another job")
    if any(one.job == old.id for one in conditions(spec.after)):
        return Refused("after", f"{old.id} is the job that this one replaces")
    if (vain := in_vain(round_, spec)) is not None:
        return Refused("after", render(vain, Reader(spec.tenant)))
    full = too_many(state.tally, state.accounts, spec.tenant, 1, waiting=1, gone=1)
    more = bytes_of(spec) - bytes_of(old.spec)
    full = full or too_large(state.sizes, spec.tenant, more)
    if full is not None:
        return full  # a cap was lowered since the old one came
    cancel(
        round_,
        old,
        f"replaced by {job_part(spec.tenant, f'j{state.next_job}')}, which asks for something else",
    )
    return enter(round_, spec, request.key)


def _has_others(state: State, job: Job) -> bool:
    spec = job.spec
    group = spec.array or spec.service or spec.workflow or spec.schedule
    return bool(group) or bool(state.dependents.get(job.id))
