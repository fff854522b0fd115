"""What events of budgets, idle jobs and the clock do; a part of `apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.core.state.apply_queue import judge_holds
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
