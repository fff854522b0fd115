"""The API of sweeps: what their trials were given, reached and cost, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Annotated

from msgspec import Meta

from shoal.api.handling import aside, handles
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.calls.jobs import JobCalls
from shoal.control.history.history import History
from shoal.core.state.apply_array import parts_of
from shoal.core.state.state import State
from shoal.ledger.live import LiveLedger
from shoal.model.array import Bits, Elements
from shoal.model.job import Job
from shoal.model.sweep import INDEX, Sweep
from shoal.model.trials import (
    FIELDS,
    PAGE_MAX,
    STOPPED_EARLY,
    TRIALS_MAX,
    Trial,
    TrialsView,
    best_of,
    in_order,
)

Name = Annotated[str, Meta(max_length=256)]


class Trials:
    @handles(JobCalls.trials)
    async def trials(
        self,
        reach: Reach,
        history: History,
        live_ledger: LiveLedger | None,
        job_id: str,
        by: Name = "",
        highest: bool | None = None,
        sort: Name = "",
        offset: Annotated[int, Meta(ge=0, le=TRIALS_MAX)] = 0,
        limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 100,
    ) -> TrialsView:
        array = reach.job(job_id)
        if array.elements is None:
            raise Refusal(422, f"{job_id} is not a sweep or an array", "job")
        states, ran = _states(reach.loop.state, array)
        extents = await history.extents([f"{array.id}.{index}" for index in ran])
        costs, currency = {}, ""
        if live_ledger is not None and array.spec.gpus:
            costs, currency = await live_ledger.costs(array.id), live_ledger.prices.currency

        def view() -> TrialsView:
            sweep, elements = parts_of(array)
            trials = []
            for position, state in states.items():
                index = sweep.index_at(position)
                trial = Trial(
                    id=f"{array.id}.{index}",
                    index=index,
                    values=sweep.values_at(position) or {INDEX: str(index)},
                    state=state,
                )
                if state == STOPPED_EARLY:
                    trial.why = _last_rung(sweep, elements, position)
                trial.metrics = extents.get(trial.id, {})
                trial.step = max((one.step for one in trial.metrics.values()), default=0)
                trial.gpu_ms, trial.cost = costs.get(trial.id, (0.0, None))
                trials.append(trial)
            up = sweep.highest if highest is None else highest
            return _view(array, trials, by, sort, highest=up, page=(offset, limit))

        answer = await aside(view, len(states))
        answer.currency = currency
        return answer


def _states(state: State, array: Job) -> tuple[dict[int, str], list[int]]:
    """By positions, in their order; and the indices of those that have run."""
    sweep, elements = parts_of(array)
    count = min(sweep.count, TRIALS_MAX)
    states = dict.fromkeys(range(count), "pending")

    def known(bits: Bits) -> Iterator[int]:
        return takewhile(lambda position: position < count, bits)

    for outcome in ("succeeded", "failed", "cancelled", "timed-out"):
        states.update(dict.fromkeys(known(elements.ended(outcome)), outcome))
    halted = [one for one in known(elements.halted) if one in elements.succeeded]
    states.update(dict.fromkeys(halted, STOPPED_EARLY))
    ran = [sweep.index_at(position) for position in known(elements.ran)]
    for job_id in state.unfolded[array.id].jobs if array.id in state.arrays else ():
        job = state.jobs[job_id]
        position = sweep.position_of(job.spec.index)
        if position is not None and position < count:
            states[position] = job.state
            ran.append(job.spec.index)
    return states, ran


def _last_rung(sweep: Sweep, elements: Elements, position: int) -> str:
    """Where it was stopped: 'loss 2.31 at step 90'."""
    reached = [rung[position] for rung in elements.rungs if position in rung]
    value = reached[-1] if reached else None
    shown = "not a number" if value is None else f"{value:.4g}"
    step = elements.first_rung * sweep.halve ** (len(reached) - 1) if reached else 0
    return f"{sweep.by} {shown} at step {step}"


def _view(
    array: Job, trials: list[Trial], by: str, sort: str, *, highest: bool, page: tuple[int, int]
) -> TrialsView:
    metrics = sorted({name for trial in trials for name in trial.metrics})
    sweep, _ = parts_of(array)
    usual = sweep.by if sweep.by in metrics else next(iter(metrics), "")
    by = by or usual
    costs = [trial.cost for trial in trials if trial.gpu_ms]
    best = best_of(trials, by, highest=highest)
    answer = TrialsView(
        id=array.id,
        name=array.spec.name or "",
        state=array.state,
        variables=list(sweep.variables) or [INDEX],
        metrics=metrics,
        by=by,
        highest=highest,
        best=best.id if best is not None else "",
        total=len(trials),
        left_out=sweep.count - len(trials),
        gpu_ms=sum(trial.gpu_ms for trial in trials),
        cost=None if not costs or None in costs else sum(one or 0.0 for one in costs),
        trials=[],
    )
    best_first = ("-" if highest else "") + by if by in metrics else INDEX
    ordered = in_order(trials, answer, sort or best_first)
    if ordered is None:
        names = ", ".join([*answer.variables, *metrics, *FIELDS])
        raise Refusal(422, f"is one of {names}, with - before it to reverse", "sort")
    answer.trials = ordered[page[0] : page[0] + page[1]]
    return answer
