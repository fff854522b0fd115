"""What events of budgets, idle jobs and the clock change: who may start, and who was warned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.state.state import State
from shoal.model.budget import BudgetLevel
from shoal.model.events import (
    BudgetFreed,
    BudgetHeld,
    BudgetWarned,
    ClockJumped,
    EventBase,
    JobIdled,
    JobUsed,
)
from shoal.model.job import Phase


def judge_holds(state: State) -> None:
    """Who is held neither stands in the queue nor is room kept for it."""
    if not state.accounts.budgets and not state.queue.held:
        return
    waiting = [job for job in state.jobs.values() if job.phase is Phase.WAITING]
    for job in waiting:
        if state.accounts.held_by(job.spec.tenant):
            if job.id in state.claims:
                state.unclaim(job)
            state.forget_reservation(job)
    state.queue.judge_holds(waiting)
    state.other_gaps()
    state.look_ms = 0


def _warned(state: State, event: BudgetWarned) -> None:
    state.accounts.budgets[event.tenant] = BudgetLevel.WARNED


def _held(state: State, event: BudgetHeld) -> None:
    state.accounts.budgets[event.tenant] = BudgetLevel.HELD
    judge_holds(state)


def _freed(state: State, event: BudgetFreed) -> None:
    del state.accounts.budgets[event.tenant]
    judge_holds(state)


def _idled(state: State, event: JobIdled) -> None:
    job = state.jobs[event.job]
    job.idle_since_ms, job.why = event.since_ms, event.why


def _used(state: State, event: JobUsed) -> None:
    job = state.jobs[event.job]
    job.idle_since_ms, job.why = None, event.why


def _clock_jumped(state: State, event: ClockJumped) -> None:
    state.drift_ms = event.drift_ms


APPLY_BUDGET: dict[type[EventBase], Callable[[State, Any], None]] = {
    ClockJumped: _clock_jumped,
    BudgetWarned: _warned,
    BudgetHeld: _held,
    BudgetFreed: _freed,
    JobIdled: _idled,
    JobUsed: _used,
}
