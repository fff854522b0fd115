"""Successive halving: trials of a sweep that are worse than others at the same step stop early.

A trial is judged when it reaches a rung, against those that have reached it before: nobody waits.
The value that decided is a fact, so that a controller that starts again decides the same.
"""

from __future__ import annotations

import math

from shoal.core.state.apply_array import parts_of
from shoal.core.state.ending import stop
from shoal.core.state.events.arrays import TrialJudged
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.array import Elements
from shoal.model.job import Job, JobSpec, Phase, StopCause
from shoal.model.phrases import ordinal
from shoal.model.progress import Beat
from shoal.model.report import NodeReport, Refused
from shoal.model.sweep import HALVED_MAX, Sweep
from shoal.model.trials import LOSS

# The step of the first rung, if neither the user names one nor the trials say how long they are.
FIRST_RUNG = 10
RUNGS_MAX = 32


def halve(round_: Round, inventories: list[NodeReport]) -> None:
    """Judge the trials that have reached a rung, as their members' beats show."""
    state = round_.state
    if not state.arrays:
        return
    for inventory in inventories:
        for progress in inventory.progress:
            job = state.placed[inventory.spec.id].get(progress.ref)
            if job is None or not job.spec.array or job.phase is not Phase.RUNNING:
                continue
            array = state.arrays[job.spec.array]
            sweep, elements = parts_of(array)
            if sweep.halve:
                _climb(round_, job, sweep, elements, progress.beat)


def _climb(round_: Round, job: Job, sweep: Sweep, elements: Elements, beat: Beat) -> None:
    """Up to the highest rung that it has reached, unless it stops before."""
    value = beat.loss if sweep.by == LOSS else None
    value = beat.metrics.get(sweep.by, value)
    position = sweep.position_of(job.spec.index)
    if value is None or position is None:
        return
    total = beat.steps_total
    usual = max(1, total // sweep.halve**2) if total else FIRST_RUNG
    first = sweep.rung or elements.first_rung or usual
    for rung in range(RUNGS_MAX):
        at_step = first * sweep.halve**rung
        if beat.step < at_step or 0 < total <= at_step:
            return  # not there yet, or it has as good as done its work
        if rung < len(elements.rungs) and position in elements.rungs[rung]:
            continue
        if not _judged(round_, job, sweep, elements, rung, at_step, beat.step, value):
            return


def _judged(
    round_: Round,
    job: Job,
    sweep: Sweep,
    elements: Elements,
    rung: int,
    at_step: int,
    step: int,
    reported: float,
) -> bool:
    """Whether it goes on: it is among the best of those that have reached the rung so far."""
    value = reported if math.isfinite(reported) else None
    others = list(elements.rungs[rung].values()) if rung < len(elements.rungs) else []
    rank = 1 + sum(_better(other, value, highest=sweep.highest) for other in others)
    count = len(others) + 1
    keep = count // sweep.halve
    goes_on = not keep or rank <= keep
    round_.emit(
        TrialJudged(
            at_ms=round_.now_ms,
            job=job.id,
            attempt=job.attempt,
            rung=rung,
            at_step=at_step,
            step=step,
            metric=sweep.by,
            value=value,
            rank=rank,
            count=count,
            goes_on=goes_on,
        )
    )
    if not goes_on:
        shown = "not a number" if value is None else f"{value:.4g}"
        why = f"stopped early at step {step}: {sweep.by} {shown} is {ordinal(rank)} of {count}"
        stop(round_, job, StopCause.HALVING, f"{why}, and the best {keep} go on")
    return goes_on


def _better(other: float | None, value: float | None, *, highest: bool) -> bool:
    """What is not a number is worse than any."""
    if other is None or value is None:
        return other is not None
    return other > value if highest else other < value


def halving_problem(spec: JobSpec) -> Refused | None:
    """Of a sweep that wants it, or of words that mean nothing without it."""
    sweep = spec.sweep
    assert sweep is not None
    if not sweep.halve:
        if sweep.rung or sweep.highest or sweep.by != LOSS:
            return Refused("halve", "is missing; write e.g. halve: 3, or drop by, max and rung")
        return None
    if sweep.halve == 1:
        return Refused("halve", "keeps one trial of this many at each rung; write 2 or more")
    if sweep.count > HALVED_MAX:
        return Refused("halve", f"takes at most {HALVED_MAX:,} trials, not {sweep.count:,}")
    return None


# -- what always holds, in code that shares nothing with the code above ----------------------------


def halving_violation(state: State) -> str:
    """What is wrong with what trials were judged by; empty: nothing."""
    for array in state.arrays.values():
        sweep, elements = array.spec.sweep, array.elements
        if sweep is None or elements is None or not (elements.rungs or elements.halted.count):
            continue
        if not sweep.halve or not elements.first_rung:
            return f"{array.id} has judged trials, but halves nothing"
        for number in range(1, len(elements.rungs)):
            if set(elements.rungs[number]) - set(elements.rungs[number - 1]):
                return f"a trial of {array.id} has skipped a rung"
        for position in elements.halted:
            reached = [rung for rung in elements.rungs if position in rung]
            if not reached or position in elements.pending:
                return f"trial {position} of {array.id} was stopped early, but never judged"
            values, own = list(reached[-1].values()), reached[-1][position]
            better = [one for one in values if one is not None and (own is None or one != own)]
            if own is not None:
                better = [one for one in better if (one > own) == sweep.highest]
            if not better:
                return f"the best trial of {array.id} at its rung was stopped early: {position}"
    return ""
