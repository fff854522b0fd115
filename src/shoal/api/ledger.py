"""The API of the ledger: where GPU time and money went, the price list, and what is left of
budgets."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.api.handling import handles
from shoal.api.http import Response
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.calls.cluster import ClusterCalls
from shoal.calls.jobs import JobCalls
from shoal.calls.page import PageCalls
from shoal.core.features.budget import (
    GPU_US_PER_GPU_HOUR,
    WARNED_MILLI,
    Totals,
    spent_by_branch,
    used,
)
from shoal.core.state.state import State
from shoal.forms import ledger_csv
from shoal.ledger.accounts import HOUR_MS, Only
from shoal.ledger.live import TIMES_MAX, LiveLedger
from shoal.ledger.report import resets_ms, wants_spendings
from shoal.model.budget import BudgetGauge, BudgetView
from shoal.model.ledger import By, CostView, LedgerView, PriceList, problem_with
from shoal.model.policy import Tenant
from shoal.model.resources import WHOLE_GPU_MILLI

Moment = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Owner = Annotated[str, Meta(max_length=128)] | None


class Ledger:
    @handles(ClusterCalls.ledger)
    async def ledger(
        self,
        live_ledger: LiveLedger | None,
        reach: Reach,
        by: By = By.ACCOUNT,
        from_ms: Moment = 0,
        to_ms: Moment = 0,
        tenant: Owner = None,
        user: Owner = None,
    ) -> LedgerView:
        books, only = _kept(live_ledger), _only(reach, tenant, user)
        view = await _view(reach, books, by, from_ms, to_ms, only)
        if by is By.TENANT and wants_spendings(reach.loop.policy):
            notes = await _budgets(reach, books)
            view = msgspec.structs.replace(view, notes=[*view.notes, *notes])
        return view

    @handles(PageCalls.ledger_csv)
    async def as_csv(
        self,
        live_ledger: LiveLedger | None,
        reach: Reach,
        by: By = By.ACCOUNT,
        from_ms: Moment = 0,
        to_ms: Moment = 0,
        tenant: Owner = None,
        user: Owner = None,
        tokens: bool = False,
    ) -> Response[str]:
        only = _only(reach, tenant, user)
        view = await _view(reach, _kept(live_ledger), by, from_ms, to_ms, only)
        name = f"{'tokens' if tokens else 'ledger'}-by-{by.value}.csv"
        return Response(
            await asyncio.to_thread(partial(ledger_csv.text_of, view, tokens=tokens)),
            media_type="text/csv; charset=utf-8",
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )

    @handles(JobCalls.cost)
    async def cost(self, reach: Reach, live_ledger: LiveLedger | None, job_id: str) -> CostView:
        reach.job(job_id)
        return await _kept(live_ledger).cost(job_id)

    @handles(ClusterCalls.prices)
    def prices(self, live_ledger: LiveLedger | None) -> PriceList:
        return _kept(live_ledger).prices

    @handles(ClusterCalls.set_prices)
    async def set_prices(self, live_ledger: LiveLedger | None, data: PriceList) -> PriceList:
        wrong = problem_with(data)
        if wrong is not None:
            field, _, message = wrong.partition(": ")
            raise Refusal(422, message, field)
        books = _kept(live_ledger)
        await asyncio.to_thread(books.set_prices, data)
        return books.prices


def _only(reach: Reach, tenant: str | None, user: str | None) -> Only:
    """What the sender asks for, within what it may see."""
    who = reach.who
    if who.sees_all:
        return Only(tenant=tenant, user=user)
    if tenant not in (None, who.tenant):
        raise Refusal(404, f"there is no tenant {tenant[:64]!r} that you may see", "tenant")
    return Only(tenant=who.tenant, user=user)


async def _view(
    reach: Reach, books: LiveLedger, by: By, from_ms: int, to_ms: int, only: Only
) -> LedgerView:
    # Amounts are kept by the hour, and an earlier tenant of this name had used up its own by then.
    own_ms = -(-reach.who.since_ms // HOUR_MS) * HOUR_MS
    from_ms = max(from_ms, own_ms)
    if to_ms and to_ms <= from_ms:
        raise Refusal(422, "must be later than from_ms", "to_ms")
    begin_ms = max(from_ms, books.book.cluster.began_ms)
    hours = ((to_ms or reach.loop.clock.now_ms()) - begin_ms) // HOUR_MS
    if by is By.HOUR and hours > TIMES_MAX:
        raise Refusal(422, f"has {hours} hours, the most is {TIMES_MAX}; use by=day", "by")
    return await books.view(by, from_ms, to_ms, only)


async def _budgets(reach: Reach, live_ledger: LiveLedger) -> list[str]:
    """How much of its budget each tenant has used, one line each."""
    loop = reach.loop
    spendings = await live_ledger.spendings(loop.policy)
    await loop.settled()
    totals = spent_by_branch(loop.state, spendings)
    lines = []
    for tenant in reach.policy().tenants:
        if tenant.has_budget:
            told = used(tenant, totals)
            lines.append(f"{told.milli / 10:.0f} %: {told.text}")
    return lines


def _kept(live_ledger: LiveLedger | None) -> LiveLedger:
    if live_ledger is None:
        raise Refusal(404, "this cluster has no ledger", "ledger")
    return live_ledger


# `GET /v1/budgets`: how much of its budget each tenant has used, and how long the rest lasts.


BUDGETS_MAX = 1_000


class Budgets:
    @handles(PageCalls.budgets)
    async def budgets(self, reach: Reach, live_ledger: LiveLedger | None) -> list[BudgetView]:
        loop = reach.loop
        if live_ledger is None or not wants_spendings(reach.policy()):
            return []
        spendings = await live_ledger.spendings(loop.policy)
        await loop.settled()
        now_ms, totals = loop.clock.now_ms(), spent_by_branch(loop.state, spendings)
        views = [
            _budget_view(loop.state, tenant, totals, now_ms, live_ledger.prices.currency)
            for tenant in reach.policy().tenants
            if tenant.has_budget
        ]
        return sorted(views, key=lambda view: (-view.share, view.tenant))[:BUDGETS_MAX]


def _budget_view(
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
    if tenant.budget_tokens:
        tokens = spent.tokens if spent else 0
        gauges.append(_gauge("tokens", tokens, tenant.budget_tokens, 0, now_ms))
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
