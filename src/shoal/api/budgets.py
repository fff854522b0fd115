"""`GET /v1/budgets`: how much of its budget each tenant has used, and how long the rest lasts."""

from __future__ import annotations

from litestar import Controller

from shoal.api.handling import handles
from shoal.api.reach import Reach
from shoal.calls.page import PageCalls
from shoal.core.features.budget import (
    GPU_US_PER_GPU_HOUR,
    WARNED_MILLI,
    Totals,
    spent_by_branch,
    used,
)
from shoal.core.state.state import State
from shoal.ledger.accounts import HOUR_MS
from shoal.ledger.live import LiveLedger
from shoal.ledger.report import resets_ms, wants_spendings
from shoal.model.budget import BudgetGauge, BudgetView
from shoal.model.policy import Tenant
from shoal.model.resources import WHOLE_GPU_MILLI

BUDGETS_MAX = 1_000


class Budgets(Controller):
    @handles(PageCalls.budgets)
    async def budgets(self, reach: Reach, live_ledger: LiveLedger | None) -> list[BudgetView]:
        loop = reach.loop
        if live_ledger is None or not wants_spendings(reach.policy()):
            return []
        spendings = await live_ledger.spendings(loop.policy)
        await loop.settled()
        now_ms, totals = loop.clock.now_ms(), spent_by_branch(loop.state, spendings)
        views = [
            _view(loop.state, tenant, totals, now_ms, live_ledger.prices.currency)
            for tenant in reach.policy().tenants
            if tenant.has_budget
        ]
        return sorted(views, key=lambda view: (-view.share, view.tenant))[:BUDGETS_MAX]


def _view(
    state: State,
    tenant: Tenant,
    totals: Totals,
    now_ms: int,
    currency: str,
) -> BudgetView:
    told = used(tenant, totals)
    spent = totals.get((tenant.name, tenant.budget_period))
    account = state.accounts.sums.get(tenant.name)
    gpus = (account.gpu_milli if account is not None else 0) / WHOLE_GPU_MILLI
    hours = spent.gpu_us / GPU_US_PER_GPU_HOUR if spent else 0.0
    gauges = []
    if tenant.budget_gpu_hours:
        gauges.append(_gauge("GPU-hours", hours, tenant.budget_gpu_hours, gpus, now_ms))
    if tenant.budget_money:
        paid = spent.money_milli / 1000 if spent else 0.0
        priced = (spent.gpu_us - spent.unpriced_us) / GPU_US_PER_GPU_HOUR if spent else 0.0
        rate = gpus * paid / priced if priced else 0.0  # what a GPU-hour has cost so far
        gauges.append(_gauge(currency or "money", paid, tenant.budget_money, rate, now_ms))
    held = state.accounts.held_by(tenant.name)
    return BudgetView(
        tenant=tenant.name,
        period=tenant.budget_period,
        level=state.accounts.budgets.get(tenant.name),
        share=told.milli / 1000,
        warns_at=WARNED_MILLI / 1000,
        resets_ms=resets_ms(tenant.budget_period, now_ms),
        gpus=gpus,
        waiting=state.tally.waiting.get(tenant.name, 0) if held else 0,
        gauges=gauges,
        text=told.text,
    )


def _gauge(unit: str, spent: float, limit: float, per_hour: float, now_ms: int) -> BudgetGauge:
    left = max(0.0, limit - spent)
    ends_ms = now_ms + int(left / per_hour * HOUR_MS) if per_hour else None
    return BudgetGauge(unit=unit, used=spent, limit=limit, per_hour=per_hour, ends_ms=ends_ms)
