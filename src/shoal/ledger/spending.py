"""What each tenant has spent in a month and in all, for the budgets of the policy."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from shoal.ledger.accounts import HOUR_MS
from shoal.ledger.prices import NOTHING
from shoal.ledger.report import Tariff
from shoal.ledger.store import LedgerStore, Sum
from shoal.model.budget import BudgetPeriod, Spending
from shoal.model.ledger import By
from shoal.model.policy import Policy

# What is booked later than this lands in hours that are summed up anew once an hour.
OPEN_HOURS = 2


def wants_spendings(policy: Policy) -> bool:
    return any(tenant.has_budget for tenant in policy.tenants)


def since_hour(period: BudgetPeriod, now_ms: int) -> int:
    if period is BudgetPeriod.TOTAL:
        return 0
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return int(month.timestamp() * 1000) // HOUR_MS


class Spent:
    """Hours long past are added up once an hour, the newest every time."""

    def __init__(self) -> None:
        self._closed: dict[BudgetPeriod, tuple[tuple[int, int], list[Sum]]] = {}

    def sums(
        self, shelf: LedgerStore, rates: dict[int, int], period: BudgetPeriod, now_ms: int
    ) -> list[Sum]:
        since, hour = since_hour(period, now_ms), now_ms // HOUR_MS
        split = max(since, hour - OPEN_HOURS)
        key, closed = self._closed.get(period, ((-1, -1), []))
        if key != (since, split) or set(rates.values()) - {one.rate for one in closed}:
            closed = shelf.sums(By.TENANT, since, split, rates)
            self._closed[period] = ((since, split), closed)
        return closed + shelf.sums(By.TENANT, split, hour + 1, rates)


def spendings(
    policy: Policy, tariff: Tariff, sums: dict[BudgetPeriod, Iterable[Sum]]
) -> tuple[Spending, ...]:
    """Of all tenants; those of the policy even if they have spent nothing."""
    told = []
    priced = bool(tariff.prices.currency)
    for period, found in sums.items():
        amounts = {tenant.name: 0 for tenant in policy.tenants}
        moneys = dict.fromkeys(amounts, NOTHING)
        for one in found:
            tenant = str(one.key)
            if tenant:
                amounts[tenant] = amounts.get(tenant, 0) + one.gpu_us
                spent = tariff.money(one.rate, one.account, one.gpu_us)
                moneys[tenant] = moneys.get(tenant, NOTHING).plus(spent)
        for tenant, gpu_us in amounts.items():
            cost = moneys[tenant].cost
            milli = int(cost * 1000) if cost is not None and priced else None
            told.append(Spending(tenant=tenant, period=period, gpu_us=gpu_us, money_milli=milli))
    return tuple(told)
