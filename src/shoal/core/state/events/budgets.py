"""What happens to the budgets of tenants."""

from __future__ import annotations

from shoal.core.state.apply_queue import judge_holds
from shoal.core.state.events.base import EventBase, Reader
from shoal.core.state.state import State
from shoal.model.budget import BudgetLevel
from shoal.model.phrases import because


class BudgetEvent(EventBase, frozen=True, kw_only=True):
    tenant: str
    why: str = ""

    @property
    def subject(self) -> str:
        return f"tenant {self.tenant}"

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_tenant(self.tenant, self.at_ms)


class BudgetWarned(BudgetEvent, frozen=True, kw_only=True):
    """The tenant has used 80 % of its budget."""

    def apply(self, state: State) -> None:
        state.accounts.budgets[self.tenant] = BudgetLevel.WARNED

    def phrase(self) -> str:
        return f"was warned about its budget{because(self.why)}"


class BudgetHeld(BudgetEvent, frozen=True, kw_only=True):
    """The tenant has used all of its budget: its jobs, and those of its branches, keep waiting."""

    def apply(self, state: State) -> None:
        state.accounts.budgets[self.tenant] = BudgetLevel.HELD
        judge_holds(state)

    def phrase(self) -> str:
        return f"has used up its budget{because(self.why)}"


class BudgetFreed(BudgetEvent, frozen=True, kw_only=True):
    """The tenant has budget left again, or no longer has a budget."""

    def apply(self, state: State) -> None:
        del state.accounts.budgets[self.tenant]
        judge_holds(state)

    def phrase(self) -> str:
        return f"has budget again{because(self.why)}"
