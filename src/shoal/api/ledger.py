"""The API of the ledger: where GPU time and money went, what a job cost, and the price list."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from litestar import Controller, Response
from litestar.params import Parameter

from shoal.api.handling import handles
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.calls.cluster import ClusterCalls
from shoal.calls.jobs import JobCalls
from shoal.calls.page import PageCalls
from shoal.core.features.budget import spent_by_branch, used
from shoal.forms import ledger_csv
from shoal.ledger.accounts import HOUR_MS
from shoal.ledger.live import TIMES_MAX, LiveLedger
from shoal.ledger.only import Only
from shoal.ledger.report import wants_spendings
from shoal.model.ledger import By, CostView, LedgerView, PriceList, problem_with

Moment = Annotated[int, Parameter(ge=0, le=2**53 - 1)]
Owner = Annotated[str | None, Parameter(max_length=128)]


class Ledger(Controller):
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
    ) -> Response[str]:
        only = _only(reach, tenant, user)
        view = await _view(reach, _kept(live_ledger), by, from_ms, to_ms, only)
        name = f"ledger-by-{by.value}.csv"
        return Response(
            await asyncio.to_thread(ledger_csv.text_of, view),
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
