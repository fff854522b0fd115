"""What must hold for jobs that wait for others, stated apart from the code that keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.model.job import Phase

if TYPE_CHECKING:
    from shoal.core.state.state import State


def after_problem(state: State) -> str:
    """Empty if all is well."""
    waiting: dict[str, dict[str, None]] = {}
    flows: dict[str, dict[str, None]] = {}
    for job in (*state.jobs.values(), *state.arrays.values()):
        named = {text.partition(":")[0] for text in job.spec.after}
        for other in job.awaits:
            waiting.setdefault(other, {})[job.id] = None
            if other not in state.jobs and other.partition(".")[0] not in state.arrays:
                return f"{job.id} waits for {other}, which is not live"
            if other not in named:
                return f"{job.id} waits for {other}, but was not asked to"
        if job.awaits and (job.phase is not Phase.WAITING or job.attempt):
            return f"{job.id} is {job.phase.value}, but waits for {job.awaits[0]}"
        if job.elements is None and bool(job.awaits) != (job.number in state.queue.parked):
            return f"{job.id} is not where jobs wait for others, or should not be there"
        if job.spec.workflow:
            flows.setdefault(job.spec.workflow, {})[job.id] = None
    if waiting != state.dependents:
        return "the index of jobs that wait for others does not match the jobs"
    if flows != state.flows:
        return "the index of workflows does not match the jobs"
    return ""


def schedule_problem(state: State) -> str:
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
