"""Caps on GPUs: what a tenant and its branches hold, and how much more they may."""

from __future__ import annotations

from shoal.core.state.state import State
from shoal.model.job import Job
from shoal.model.reason import tenant_part
from shoal.model.resources import WHOLE_GPU_MILLI, Slice, plural


def capped_by(state: State, tenant: str, more_milli: int, *, without: str = "") -> str:
    """The tenant or ancestor that may not hold so much more; empty if there is none. `without`: a
    job whose claim does not count."""
    if state.accounts.caps and more_milli > 0:
        for one in state.accounts.lineage(tenant):
            if one.gpus_max and cap_left(state, one.name, without=without) < more_milli:
                return one.name
    return ""


def cap_left(state: State, name: str, *, without: str = "") -> int:
    """How much more a tenant that has a cap may hold, in GPU-thousandths; less than 0 if the cap
    was lowered since."""
    most = state.policy.tenant(name).gpus_max * WHOLE_GPU_MILLI
    return most - held_under(state, name, without=without)


def room_under_caps(state: State, tenant: str) -> int | None:
    """The same for any tenant; None: no cap is above it."""
    if not state.accounts.caps:
        return None
    capped = (one.name for one in state.accounts.lineage(tenant) if one.gpus_max)
    return min((cap_left(state, name) for name in capped), default=None)


def held_under(state: State, name: str, *, without: str = "") -> int:
    """What the tenant and its branches hold, and what has been claimed for them beyond that."""
    account = state.accounts.sums.get(name)
    held = account.gpu_milli if account is not None else 0
    for job_id, given in state.claims.items():
        job = state.jobs[job_id]
        if job_id != without and is_under(state, job.spec.tenant, name):
            held += max(0, milli_of(given) - held_by_job(job))
    return held


def cap_text(state: State, name: str) -> str:
    """What the tenant holds of what it may, for reasons."""
    held = f"{held_under(state, name) / WHOLE_GPU_MILLI:g}"
    most = plural(state.policy.tenant(name).gpus_max, "GPU")
    return f"{tenant_part(name)} holds {held} of at most {most} (gpus_max in the policy)"


def milli_of(given: tuple[Slice, ...]) -> int:
    return sum(len(slice_.gpus) * slice_.gpu_milli for slice_ in given)


def held_by_job(job: Job) -> int:
    return milli_of(tuple(one.slice for one in job.members if not one.over and not one.lent))


def is_under(state: State, name: str, top: str) -> bool:
    return any(one.name == top for one in state.accounts.lineage(name))
