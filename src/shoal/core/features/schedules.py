"""Schedules: what users ask of them, and the runs that are due."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.core.features.caps import too_large
from shoal.core.features.workflow import enter, enter_all
from shoal.core.state.events.schedules import (
    ScheduleMissed,
    SchedulePaused,
    ScheduleRan,
    ScheduleRemoved,
    ScheduleResumed,
    ScheduleSet,
    ScheduleSkipped,
)
from shoal.core.state.round import Round
from shoal.core.state.sizes import schedule_bytes
from shoal.core.state.state import State
from shoal.model.durations import moment_text
from shoal.model.identity import EVERY_TENANT, Role, role_in
from shoal.model.job import JobSpec
from shoal.model.reason import job_part
from shoal.model.report import (
    Accepted,
    Answer,
    PauseSchedule,
    Refused,
    RunSchedule,
    ScheduleRequest,
    SetSchedule,
)
from shoal.model.schedule import (
    COUNTED_MAX,
    SCHEDULES_MAX,
    Due,
    Missed,
    Overlap,
    Schedule,
    ScheduleSpec,
)

# A run that is due and not later than this is on time: a restart of the controller takes seconds.
LATE_MS = 60_000

Problem = Callable[[Round, ScheduleSpec, str], Refused | None]


def change_schedule(round_: Round, request: ScheduleRequest, problem: Problem) -> Answer:
    if isinstance(request, SetSchedule):
        return _set(round_, request, problem)
    schedule = round_.state.schedules.get(request.schedule)
    if schedule is None or request.scope not in (EVERY_TENANT, schedule.spec.tenant):
        name = request.schedule.partition("/")[2]
        message = f"there is no schedule {name[:64]!r}; see: shoal schedule list"
        return Refused("schedule", message, missing=True)
    if isinstance(request, RunSchedule):
        return _run_now(round_, schedule, request, problem)
    if isinstance(request, PauseSchedule):
        return _pause(round_, schedule, request)
    why = f"removed by {request.who}"
    round_.emit(ScheduleRemoved(at_ms=round_.now_ms, schedule=request.schedule, why=why))
    return Accepted(schedule.spec.name)


def _set(round_: Round, request: SetSchedule, problem: Problem) -> Answer:
    state, spec = round_.state, request.spec
    before = state.schedules.get(spec.key)
    for job in spec.jobs:
        if job.spec.after or job.spec.begin_ms:
            field = "after" if job.spec.after else "begin"
            fix = "write the jobs as a workflow" if job.spec.after else "the schedule says when"
            return Refused(field, f"has no place in a schedule; {fix}")
    if (wrong := problem(round_, spec, request.scope)) is not None and wrong.full is None:
        return wrong
    own = sum(one.spec.tenant == spec.tenant for one in state.schedules.values())
    if before is None and own >= SCHEDULES_MAX:
        message = f"{spec.tenant} has {own:,} schedules, the maximum; remove one"
        return Refused("schedule", message)
    more = schedule_bytes(spec) - (schedule_bytes(before.spec) if before is not None else 0)
    if (large := too_large(state.sizes, spec.tenant, more, "schedule")) is not None:
        return large
    if (
        before is not None
        and (before.spec, before.owner) == (spec, request.owner)
        and before.next_ms
    ):
        return Accepted(spec.name, "no change")
    round_.emit(
        ScheduleSet(
            at_ms=round_.now_ms,
            schedule=spec.key,
            spec=spec,
            owner=request.owner,
            next_ms=request.next_ms,
            why=f"set by {request.who}",
        )
    )
    return Accepted(spec.name, "it was changed" if before is not None else "")


def _pause(round_: Round, schedule: Schedule, request: PauseSchedule) -> Answer:
    key, now_ms = request.schedule, round_.now_ms
    if bool(request.next_ms) == bool(schedule.next_ms):
        return Accepted(schedule.spec.name, "it is paused" if schedule.paused else "it is active")
    if request.next_ms:
        why = f"resumed by {request.who}"
        round_.emit(ScheduleResumed(at_ms=now_ms, schedule=key, next_ms=request.next_ms, why=why))
    else:
        why = f"paused by {request.who}"
        round_.emit(SchedulePaused(at_ms=now_ms, schedule=key, why=why))
    return Accepted(schedule.spec.name)


def _run_now(round_: Round, schedule: Schedule, request: RunSchedule, problem: Problem) -> Answer:
    known = round_.state.keys.get(request.key) or round_.finished_keys.get(request.key)
    if request.key and known:
        return Accepted(known, "this run was already accepted")
    wrong = problem(round_, schedule.spec, request.scope)
    return wrong or Accepted(
        _run(round_, schedule, round_.now_ms, schedule.next_ms, f"by {request.who}", request.key)
    )


def run_schedules(round_: Round, dues: tuple[Due, ...], problem: Problem) -> None:
    """Every due time has its run, or an event that says why not, in one transaction with the time
    of the next: so none is run twice or forgotten."""
    if not dues and not round_.state.dues:
        return
    changed = {event.schedule for event in round_.events if isinstance(event, ScheduleSet)}
    for due in dues:
        schedule = round_.state.schedules.get(due.schedule)
        if schedule is None or schedule.next_ms != due.first_ms or due.schedule in changed:
            continue  # what is due was counted by its times before this step; the next one counts
        if gone := owner_gone(round_.state, schedule):
            round_.emit(SchedulePaused(at_ms=round_.now_ms, schedule=due.schedule, why=gone))
            continue
        _run_due(round_, schedule, due, problem)
    round_.more = round_.more or bool(
        round_.state.dues and round_.state.dues[0][0] <= round_.now_ms
    )


def _run_due(round_: Round, schedule: Schedule, due: Due, problem: Problem) -> None:
    spec = schedule.spec
    on_time = round_.now_ms - due.newest_ms <= LATE_MS
    missed = due.count - on_time
    made_up = spec.missed is Missed.RUN and not on_time
    if missed:
        last_ms = due.before_ms if on_time else due.newest_ms
        least = "at least " if due.count >= COUNTED_MAX else ""
        times = "once" if missed == 1 else f"{least}{missed} times"
        span = moment_text(due.first_ms)
        span = f"at {span}" if missed == 1 else f"from {span} to {moment_text(last_ms)}"
        why = f"it was due {times}, {span}, while the controller was down"
        round_.emit(
            ScheduleMissed(
                at_ms=round_.now_ms,
                schedule=spec.key,
                count=missed,
                first_ms=due.first_ms,
                last_ms=last_ms,
                next_ms=due.next_ms,
                why=f"{why}; it runs once to catch up" if made_up else why,
            )
        )
    if not on_time and not made_up:
        return
    why = ""
    if spec.overlap is Overlap.SKIP and (last := live_run(round_.state, schedule)):
        why = f"the run before it, {job_part(spec.tenant, last)}, has not ended"
    elif (wrong := problem(round_, spec, _scope(round_.state, schedule))) is not None:
        why = f"{wrong.field} {wrong.message}"
    if why:
        round_.emit(
            ScheduleSkipped(
                at_ms=round_.now_ms,
                schedule=spec.key,
                due_ms=due.newest_ms,
                next_ms=due.next_ms,
                why=why,
            )
        )
    else:
        _run(round_, schedule, due.newest_ms, due.next_ms, "made up for" if made_up else "")


def _run(
    round_: Round, schedule: Schedule, due_ms: int, next_ms: int, why: str, key: str = ""
) -> str:
    spec, job_id = schedule.spec, f"j{round_.state.next_job}"
    round_.emit(
        ScheduleRan(
            at_ms=round_.now_ms,
            schedule=spec.key,
            due_ms=due_ms,
            next_ms=next_ms,
            job=job_id,
            why=why,
        )
    )
    jobs = tuple(
        msgspec.structs.replace(job, spec=_of_run(spec, job.spec, due_ms)) for job in spec.jobs
    )
    if spec.workflow:
        enter_all(round_, jobs, key)
    else:
        enter(round_, jobs[0].spec, key)
    return job_id


def _of_run(spec: ScheduleSpec, job: JobSpec, due_ms: int) -> JobSpec:
    return msgspec.structs.replace(
        job, name=job.name or spec.name, schedule=spec.name, scheduled_ms=due_ms
    )


def live_run(state: State, schedule: Schedule) -> str:
    """A job of its newest run that has not ended; empty: there is none."""
    last = schedule.last_job
    if schedule.spec.workflow:
        return next(iter(state.flows.get(last, ())), "")
    return last if state.live(last) is not None else ""


def _scope(state: State, schedule: Schedule) -> str:
    """A run has its owner's word, as the owner's role is now."""
    user = state.identity.users.get(schedule.owner)
    if user is None or role_in(user, EVERY_TENANT) is Role.ADMIN:
        return EVERY_TENANT  # the operator's, or an admin's
    return schedule.spec.tenant


def owner_gone(state: State, schedule: Schedule) -> str:
    """Nobody's jobs run for a user who is gone, or who may no longer submit any."""
    if not schedule.owner:
        return ""  # it is the operator's
    user = state.identity.users.get(schedule.owner)
    if user is None:
        return f"its user {schedule.owner} was removed"
    role, tenant = role_in(user, schedule.spec.tenant), schedule.spec.tenant
    if role is None or role is Role.VIEWER:
        return f"its user {schedule.owner} may no longer submit jobs of {tenant}"
    return ""


def pause_schedules(round_: Round, user: str) -> None:
    """They must not come to life for another user of the same name."""
    for key, schedule in list(round_.state.schedules.items()):
        if schedule.owner == user and schedule.next_ms:
            why = f"its user {user} was removed"
            round_.emit(SchedulePaused(at_ms=round_.now_ms, schedule=key, why=why))


def schedules_of(state: State, user: str) -> set[str]:
    """The tenants in which the user has schedules that are not paused."""
    live = (one for one in state.schedules.values() if one.owner == user and one.next_ms)
    return {one.spec.tenant for one in live}


def hand_schedules(round_: Round, user: str, heir: str) -> None:
    """They go on at their times, as jobs of the heir."""
    replace = msgspec.structs.replace
    for key, schedule in list(round_.state.schedules.items()):
        if schedule.owner == user and schedule.next_ms:
            jobs = tuple(
                replace(job, spec=replace(job.spec, user=heir)) for job in schedule.spec.jobs
            )
            round_.emit(
                ScheduleSet(
                    at_ms=round_.now_ms,
                    schedule=key,
                    spec=replace(schedule.spec, jobs=jobs),
                    next_ms=schedule.next_ms,
                    owner=heir,
                    why=f"handed over from {user}",
                )
            )


def drop_schedules(round_: Round, tenant: str) -> None:
    """They must not come to life for another tenant of the same name."""
    for key, schedule in list(round_.state.schedules.items()):
        if schedule.spec.tenant == tenant:
            why = f"the tenant {tenant} was removed"
            round_.emit(ScheduleRemoved(at_ms=round_.now_ms, schedule=key, why=why))


# -- what always holds, in code that shares nothing with the code above ----------------------------


def schedules_violation(state: State) -> str:
    """Empty if all is well."""
    heap = set(state.dues)
    for key, schedule in state.schedules.items():
        tenant = schedule.spec.jobs[0].spec.tenant
        if key != f"{tenant}/{schedule.spec.name}":
            return f"the schedule {key} is kept under another name"
        if bool(schedule.paused) == bool(schedule.next_ms):
            return f"the schedule {key} is paused, but due at some time, or neither"
        if schedule.next_ms and (schedule.next_ms, key) not in heap:
            return f"the schedule {key} would never be looked at again"
    if state.dues:
        due_ms, key = state.dues[0]
        first = state.schedules.get(key)
        if first is None or first.next_ms != due_ms or due_ms != sorted(heap)[0][0]:
            return f"the first due time, of {key}, is not right"
    return ""
