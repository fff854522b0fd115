"""Why a job does not start on nodes that have room but end too early for it."""

from __future__ import annotations

from collections.abc import Collection

from shoal.core.scheduling.ends import end_text, goes_on, left_ms, need_ms, too_short
from shoal.core.scheduling.fit import members_here
from shoal.core.state.queue import gang_of
from shoal.core.state.state import State
from shoal.model.durations import duration_text
from shoal.model.job import Job


def ends_first(state: State, job: Job, other: Collection[int], now_ms: int) -> str:
    """For instance "n3 has room, but ends in 40m (Slurm time limit), and this job is expected to
    run 2h"; empty if no such node has room. `other`: nodes that are closed to it anyway."""
    gang = gang_of(job)
    found = [
        state.order[index]
        for index in sorted(too_short(state, job, now_ms) - set(other))
        if gang.demand.suits((room := state.rooms[index]).kind)
        and members_here(gang, room.kind, room.level)
    ]
    ends = [(node.end, node.id) for node in found if node.end is not None]
    if not ends:
        return ""
    end, name = max(ends, key=lambda entry: entry[0].at_ms)
    more = len(ends) - 1
    have = f"{name} and {more} more have room, but {name}" if more else f"{name} has room, but"
    return f"{have} {end_text(end, now_ms)}, and {too_long(state, job)}"


def too_long(state: State, job: Job) -> str:
    left = left_ms(state, job)
    if goes_on(job):
        return f"a start pays only if {duration_text(need_ms(state, job) or 0)} are left"
    advice = "give it a time limit or an estimate" if left is None else "give it a shorter one"
    if left is not None and not job.spec.time_limit_ms:
        advice = "give it a time limit"
    advice += ", or save its work and make it preemptible"
    if left is None:
        needs = need_ms(state, job)
        only = f", so {duration_text(needs)} have to be left" if needs is not None else ""
        return f"how long this job runs is not known{only}; {advice}"
    return f"this job is expected to run {duration_text(left)}; {advice}"
