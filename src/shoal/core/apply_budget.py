"""What events of budgets change: whose jobs may start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.state import State
from shoal.model.budget import BudgetLevel
from shoal.model.events import BudgetFreed, BudgetHeld, BudgetWarned, EventBase
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


APPLY_BUDGET: dict[type[EventBase], Callable[[State, Any], None]] = {
    BudgetWarned: _warned,
    BudgetHeld: _held,
    BudgetFreed: _freed,
}
