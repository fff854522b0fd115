"""Why a roll-out does not go on, or a service sleeps: computed from the state on request."""

from __future__ import annotations

from shoal.core.answers.why import explain
from shoal.core.phases.serve_sleep import stays_awake
from shoal.core.state.state import State
from shoal.model.job import Phase
from shoal.model.policy import Policy
from shoal.model.service import Rollout, Service

TRIED_MS = 2_000  # it takes a few looks until an old replica leaves for a new one


def sleeps(state: State, service: Service, policy: Policy, now_ms: int) -> str:
    """Why its replicas sleep, or cannot sleep without requests; empty if neither is so."""
    if not service.ready:
        for job_id in state.replicas.get(service.spec.name, {}):
            job = state.jobs[job_id]
            if job.napping and job.spec.version == service.version:
                return f"{job.mention}: {explain(state, job, policy, now_ms)}"
    return stays_awake(state, service)


def stalled(state: State, service: Service, policy: Policy, now_ms: int) -> str:
    """Empty unless a new replica waits while old ones serve."""
    jobs = [state.jobs[job_id] for job_id in state.replicas.get(service.spec.name, {})]
    old = [job for job in jobs if job.id in service.ready and job.spec.version != service.version]
    waiting = [
        job
        for job in jobs
        if job.spec.version == service.version
        and job.phase is Phase.WAITING
        and job.submitted_ms + TRIED_MS < now_ms
    ]
    if not old or not waiting:
        return ""
    job, leaving = waiting[0], [one for one in old if one.id in service.draining]
    who = f"{job.mention} of version {service.version}"
    if leaving:
        return (
            f"{who} waits until {leaving[0].mention} of version {leaving[0].spec.version} has left"
        )
    why = explain(state, job, policy, now_ms)
    if service.spec.rollout is Rollout.SURGE:
        help_ = "to drain an old replica first, serve it again with --rollout replace"
        return f"{who} waits for room beside version {old[0].spec.version}: {why}; {help_}"
    serving = [job_id for job_id in service.ready if job_id not in service.draining]
    if len(serving) < service.wanted:
        stay = f"{len(serving)} of {service.wanted} replicas are ready, so the old ones stay"
        return f"{who} waits for room: {why}; {stay}"
    more = "; --at-a-time lets more of them leave" if len(old) > 1 else ""
    return f"{who} does not fit in place of an old replica: {why}{more}"
