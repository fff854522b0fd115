"""What each tenant has spent this month and in total, for the policy's budgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from typing import NamedTuple

from shoal.ledger.accounts import HOUR_MS
from shoal.ledger.report import Tariff
from shoal.ledger.store import LedgerStore, Sum
from shoal.model.budget import BudgetPeriod, Spending
from shoal.model.ledger import By
from shoal.model.policy import Policy

# Late bookings in older hours show up when these are summed up again, once an hour.
OPEN_HOURS = 2


def wants_spendings(policy: Policy) -> bool:
    return any(tenant.has_budget for tenant in policy.tenants)


def since_hour(period: BudgetPeriod, now_ms: int) -> int:
    if period is BudgetPeriod.TOTAL:
        return 0
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return int(month.timestamp() * 1000) // HOUR_MS


def resets_ms(period: BudgetPeriod, now_ms: int) -> int | None:
    """When the next period begins; None: never."""
    if period is BudgetPeriod.TOTAL:
        return None
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    year, month = (now.year + 1, 1) if now.month == 12 else (now.year, now.month + 1)
    return int(datetime(year, month, 1, tzinfo=UTC).timestamp() * 1000)


class _Key(NamedTuple):
    """The range and rates of cached sums."""

    since: int
    until: int
    rates: dict[int, int]


class Spent:
    """Old hours are summed up once an hour, the newest every time."""

    def __init__(self) -> None:
        self._closed: dict[BudgetPeriod, tuple[_Key, list[Sum]]] = {}

    def sums(
        self,
        store: LedgerStore,
        rates: dict[int, int],
        period: BudgetPeriod,
        since: int,
        until: int,
    ) -> list[Sum]:
        """From hour `since` up to, but not including, `until`: the hour after the current one."""
        split = max(since, until - 1 - OPEN_HOURS)
        key = _Key(since, split, dict(rates))
        known, closed = self._closed.get(period, (None, []))
        if known != key:
            closed = store.sums(By.TENANT, since, split, rates)
            self._closed[period] = key, closed
        return closed + store.sums(By.TENANT, split, until, rates)


def spendings(
    policy: Policy, tariff: Tariff, sums: Mapping[BudgetPeriod, Iterable[Sum]]
) -> tuple[Spending, ...]:
    """For all tenants; those of the policy even if they have spent nothing."""
    told = []
    for period, found in sums.items():
        amounts = {tenant.name: 0 for tenant in policy.tenants}
        costs: dict[str, Fraction] = {}
        unpriced: dict[str, int] = {}
        for one in found:
            tenant = str(one.key)
            if tenant:
                amounts[tenant] = amounts.get(tenant, 0) + one.gpu_us
                cost = tariff.money(one.rate, one.account, one.gpu_us).cost
                if cost is None or not tariff.prices.currency:
                    unpriced[tenant] = unpriced.get(tenant, 0) + one.gpu_us
                else:
                    costs[tenant] = costs.get(tenant, Fraction(0)) + cost
        for tenant, gpu_us in amounts.items():
            told.append(
                Spending(
                    tenant=tenant,
                    period=period,
                    gpu_us=gpu_us,
                    money_milli=int(costs.get(tenant, Fraction(0)) * 1000),
                    unpriced_us=unpriced.get(tenant, 0),
                )
            )
    return tuple(told)
