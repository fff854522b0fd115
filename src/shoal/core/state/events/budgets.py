"""What happens to the budgets of tenants, and to the quotas of keys."""

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


class QuotaEvent(EventBase, frozen=True, kw_only=True):
    key: str
    tenant: str
    why: str = ""

    @property
    def subject(self) -> str:
        return f"key {self.key}"

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_tenant(self.tenant, self.at_ms)


class KeyHeld(QuotaEvent, frozen=True, kw_only=True):
    """The key has used up its tokens: its requests get 429 until then."""

    until_ms: int

    def apply(self, state: State) -> None:
        state.accounts.held_keys[self.key] = self.tenant, self.until_ms

    def phrase(self) -> str:
        return f"has used up its tokens{because(self.why)}"


class KeyFreed(QuotaEvent, frozen=True, kw_only=True):
    """The key has tokens again, or no quota any more."""

    def apply(self, state: State) -> None:
        state.accounts.held_keys.pop(self.key, None)

    def phrase(self) -> str:
        return f"has tokens again{because(self.why)}"
