"""The truth about budgets: only tenants that have really spent too much are held."""

from __future__ import annotations

from shoal.core.features.budget import GPU_US_PER_GPU_HOUR
from shoal.core.state.events.budgets import BudgetEvent, BudgetFreed, BudgetHeld, BudgetWarned
from shoal.core.state.events.runs import JobStopping
from shoal.model.budget import Spending
from shoal.model.job import JobSpec, Restart, StopCause
from shoal.model.policy import Policy, Tenant
from storm.lives import Untruth


class BudgetTruth:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._reported: tuple[Spending, ...] = ()
        self._held: dict[str, None] = {}
        self._moving: dict[str, bool] = {}

    def reported(self, spendings: tuple[Spending, ...]) -> None:
        self._reported = spendings

    def see(self, event: BudgetEvent) -> None:
        tenant = self.policy.tenant(event.tenant)
        used = self._part(tenant)
        if isinstance(event, BudgetHeld):
            self._held[event.tenant] = None
            just = used >= 1
        elif isinstance(event, BudgetWarned):
            just = used < 1 and (used >= 0.8 or self._unpriced(tenant))
        else:
            assert isinstance(event, BudgetFreed), "there are no others"
            self._held.pop(event.tenant, None)
            just = used < 1 or not tenant.has_budget
        if not just:
            raise Untruth(f"{event.tenant} has used {used:.2f} of its budget, but {event}")

    def placed(self, job: str, spec: JobSpec) -> None:
        """A job that only moves or changes its size ran before, so it goes on."""
        moved = self._moving.pop(job, False)
        if not moved and self._holder(spec.tenant):
            raise Untruth(f"{job} starts, though the budget of {self._holder(spec.tenant)} is gone")

    def stopping(self, event: JobStopping, spec: JobSpec) -> None:
        if event.cause in (StopCause.MOVE, StopCause.RESIZE):
            self._moving[event.job] = True
        if event.cause is not StopCause.BUDGET:
            return
        asked = self.policy.budget_stops and self._holder(spec.tenant)
        if not asked or spec.restart is Restart.NEVER:
            raise Untruth(f"{event.job} is stopped for a budget without a reason: {event.why}")

    def unclaimed(self, job: str) -> None:
        self._moving.pop(job, None)

    def _holder(self, name: str) -> str:
        chain = [name]
        while (name := self.policy.tenant(name).parent) and name not in chain:
            chain.append(name)
        return next((one for one in chain if one in self._held), "")

    def _unpriced(self, tenant: Tenant) -> bool:
        return bool(tenant.budget_money) and any(one.unpriced_us for one in self._of(tenant))

    def _of(self, tenant: Tenant) -> list[Spending]:
        return [
            one
            for one in self._reported
            if one.period is tenant.budget_period and self._is_under(one.tenant, tenant.name)
        ]

    def _part(self, tenant: Tenant) -> float:
        mine = self._of(tenant)
        parts = [0.0]
        if tenant.budget_gpu_hours:
            gpu_us = sum(one.gpu_us for one in mine)
            parts.append(gpu_us / tenant.budget_gpu_hours / GPU_US_PER_GPU_HOUR)
        if tenant.budget_money:
            parts.append(sum(one.money_milli for one in mine) / tenant.budget_money / 1000)
        return max(parts)

    def _is_under(self, name: str, top: str) -> bool:
        seen: list[str] = []
        while name and name not in seen:
            if name == top:
                return True
            seen.append(name)
            name = self.policy.tenant(name).parent
        return False
