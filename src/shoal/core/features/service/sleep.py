"""Replicas that sleep: they count as replicas, get no requests, and wake when requests come.

A replica that is put to sleep, for whatever reason, is drained first: the gateway sends it nothing
new, and its node is told to put it to sleep when nothing is under way there.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.core.books.scale import Wish
from shoal.core.features.sleep import awake, touch
from shoal.core.scheduling.sleeping import doze, why_not
from shoal.core.state.events.services import ReplicaReady
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.job import Job, Phase, SleepCause
from shoal.model.service import Service, ServiceLoad

# The gateway is told twice a second; after this long its figures are from after that.
TOLD_MS = 2_000
LOOK_MS = 500


def sized_to_sleep(
    round_: Round, service: Service, jobs: list[Job], load: ServiceLoad, wished: Wish
) -> Wish:
    """A replica that can sleep does not end: the last one stays. Without requests for long enough
    to sleep, no more than that stay."""
    least = max(1, service.spec.scale.least)
    if not service.spec.sleep_after_ms or not _can_sleep(round_.state, service, jobs):
        return wished
    idle_ms = _idle_ms(round_, service)
    if wished.wanted > least and not load.work and idle_ms >= service.spec.sleep_after_ms:
        return Wish(least, f"no request for {duration_text(idle_ms)}")
    return wished if wished.wanted else Wish(least, wished.why)


def nap_and_wake(
    round_: Round, service: Service, jobs: list[Job], load: ServiceLoad | None
) -> None:
    load = load if load is not None and load.tells else None
    if load is not None and not service.stopping:
        _wake(round_, service, jobs, load)
    _put_to_sleep(round_, service, jobs, load)
    for job in jobs:
        if job.phase is Phase.DOZING:
            _let_sleep(round_, service, job, load)


def may_freeze(state: State, job: Job) -> bool:
    """Whether a job that falls asleep need not be waited for: it is not a replica, or its requests
    are answered."""
    if job.spec.service not in state.services:
        return True
    return state.heard.quiet.get(job.id) == job.dozed_ms


def sleeps(state: State, service: Service, explain: Callable[[Job], str]) -> str:
    """Why its replicas sleep, or cannot sleep without requests; empty if neither is so."""
    if not service.ready:
        for job_id in state.replicas.get(service.spec.name, {}):
            job = state.jobs[job_id]
            if job.napping and job.spec.version == service.version:
                return f"{job.mention}: {explain(job)}"
    return stays_awake(state, service)


def stays_awake(state: State, service: Service) -> str:
    """Why a service that should sleep without requests cannot; empty if it can."""
    well = service.proven and not service.failures and not service.stopping
    for job_id in service.ready if service.spec.sleep_after_ms and well else ():
        if job_id not in service.draining and (
            reason := why_not(state, state.jobs[job_id], asked=True)
        ):
            return f"{state.jobs[job_id].mention} stays awake without requests: {reason}"
    return ""


def _can_sleep(state: State, service: Service, jobs: list[Job]) -> bool:
    return any(
        job.napping or (job.id in service.ready and not why_not(state, job, asked=True))
        for job in jobs
        if job.id not in service.draining
    )


def _idle_ms(round_: Round, service: Service) -> int:
    """How long there has been no request, and a replica that could have answered it."""
    recent = round_.state.heard.recent_work.get(service.spec.name)
    if recent is None or recent.asked_ms < 0:
        return 0
    return round_.now_ms - max(recent.asked_ms, *service.ready.values(), 0)


def _put_to_sleep(
    round_: Round, service: Service, jobs: list[Job], load: ServiceLoad | None
) -> None:
    """All that stay without requests: one, or the least that the service asks for. No step comes by
    itself while the gateway sees nothing new, so it is asked for."""
    after_ms = service.spec.sleep_after_ms
    if not after_ms or (load is not None and load.work):
        return
    staying = [
        job
        for job in jobs
        if job.id not in service.draining and job.phase not in (Phase.STOPPING, Phase.FINISHED)
    ]
    settled = (
        service.proven
        and not service.stopping
        and len(staying) == service.wanted <= max(1, service.spec.scale.least)
        and all(job.spec.version == service.version for job in staying)
        and all(job.id in service.ready or job.napping for job in staying)
    )
    can = [
        job
        for job in staying
        if job.id in service.ready and not why_not(round_.state, job, asked=True)
    ]
    if not settled or not can:
        return
    idle_ms = _idle_ms(round_, service)
    if load is None or idle_ms < after_ms:
        look_at(round_, round_.now_ms + max(after_ms - idle_ms, LOOK_MS))
        return
    for job in can:
        if not why_not(round_.state, job, asked=True):  # there may be one bed only
            why = f"no request for {duration_text(idle_ms)}; wakes with the next one"
            doze(round_, job, SleepCause.IDLE, why)


def _wake(round_: Round, service: Service, jobs: list[Job], load: ServiceLoad) -> None:
    serves = any(job_id not in service.draining for job_id in service.ready)
    # A gateway that cannot hold requests answers them with an error.
    asked = load.held or (not serves and (load.work or load.answers_per_ks or load.failures_per_ks))
    for job in jobs:
        if job.phase not in (Phase.DOZING, Phase.ASLEEP):
            continue
        seen = load.replicas.get(job.id)
        caught = job.phase is Phase.ASLEEP and seen is not None and seen.in_flight
        if _just_dozes(round_.state, job) and load.work:
            _call_back(round_, service, job)
        elif not job.wants and (asked or caught):
            touch(round_, job, f"requests for {service.spec.name} wait for it")


def _just_dozes(state: State, job: Job) -> bool:
    """It should sleep because it is idle, and its node was not told yet."""
    idle = job.phase is Phase.DOZING and job.sleep_cause is SleepCause.IDLE
    return idle and not may_freeze(state, job) and not any(m.asleep for m in job.members)


def _call_back(round_: Round, service: Service, job: Job) -> None:
    awake(round_, job)
    why = "requests have come before it slept"
    name = service.spec.name
    round_.emit(ReplicaReady(at_ms=round_.now_ms, service=name, job=job.id, why=why))


def _let_sleep(round_: Round, service: Service, job: Job, load: ServiceLoad | None) -> None:
    """Its node may put it to sleep when it has answered its requests, or its time for that is over:
    then it answers them when it is awake again."""
    state, now_ms, since_ms = round_.state, round_.now_ms, job.dozed_ms or 0
    if may_freeze(state, job):
        return
    seen = load.replicas.get(job.id) if load is not None else None
    told = load is not None and now_ms - since_ms >= TOLD_MS
    over_ms = since_ms + max(TOLD_MS, service.spec.drain_ms)
    if (told and not (seen and seen.in_flight)) or now_ms >= over_ms:
        state.heard.quiet[job.id] = since_ms
        round_.quiet.append(job.id)
    else:
        look_at(round_, min(over_ms, max(since_ms + TOLD_MS, now_ms + LOOK_MS)))


def look_at(round_: Round, at_ms: int) -> None:
    agenda = round_.state.agenda
    agenda.serve_ms = at_ms if agenda.serve_ms is None else min(agenda.serve_ms, at_ms)
