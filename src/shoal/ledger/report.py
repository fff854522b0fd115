"""Sums of the ledger for reports: by key and account, with money, energy and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from shoal.ledger.accounts import (
    ABOUT,
    DAY_MS,
    EVERYBODY,
    GPU_US_PER_GPU_HOUR,
    GPU_US_PER_GPU_MS,
    HOUR_MS,
    Account,
    Only,
    Place,
    Sum,
)
from shoal.ledger.book import Book
from shoal.ledger.book_state import Gap, Hardware
from shoal.ledger.postings import Nap
from shoal.ledger.prices import NOTHING, Money, Rate, money, rate_of
from shoal.ledger.store import HOURS_PER_DAY, LedgerStore
from shoal.model.amounts import money_text, share_text, time_words
from shoal.model.budget import BudgetPeriod, Spending
from shoal.model.ledger import AccountSum, By, CostView, LedgerRow, LedgerView, PriceList
from shoal.model.policy import Policy

OTHERS = "others"
WASTE = {
    Account.IDLE: "idle allocations",
    Account.RECOMPUTE: "failures",
    Account.PREEMPTED: "preemptions",
}
NAMED_MAX = 20  # models named in a note


class Tariff:
    """Groups machines by cost: those that cost the same share a rate."""

    def __init__(
        self,
        prices: PriceList,
        machines: Iterable[tuple[int, str, Hardware]],
        *,
        measured: bool = False,
    ) -> None:
        """`measured`: the energy of some GPUs was."""
        self.prices = prices
        self.measured = measured
        self.rates: list[Rate] = []
        self.of_machine: dict[int, int] = {}
        self._unpriced: dict[str, None] = {}
        self._unpowered: dict[str, None] = {}
        self._models: list[str] = []
        numbers: dict[tuple[Rate, str], int] = {}
        for id_, node, machine in machines:
            rate = rate_of(prices, node, machine)
            key = (rate, machine.model)
            if key not in numbers:
                numbers[key] = len(self.rates)
                self.rates.append(rate)
                self._models.append(machine.model)
            self.of_machine[id_] = numbers[key]

    def money(self, spent: Sum) -> Money:
        rate, model = self.rates[spent.rate], self._models[spent.rate]
        if rate.per_hour is None:
            self._unpriced[model] = None
        if rate.watts is None and spent.measured_us < spent.gpu_us:
            self._unpowered[model] = None
        return money(self.prices, rate, spent)

    def sums(
        self, store: LedgerStore, by: By, since: int, until: int, only: Only = EVERYBODY
    ) -> list[Sum]:
        return store.sums(by, since, until, self.of_machine, only, measured=self.measured)

    def notes(self) -> list[str]:
        """Notes on what is missing in the price list."""
        notes = []
        if self._unpriced and self.prices.currency:
            notes.append(
                f"no price for {_models(self._unpriced)}: costs that would include it are left "
                "out; add it to the price list under gpus, then: shoal prices set FILE"
            )
        elif self._unpriced:
            notes.append("no price list is set, so no costs are shown; see: shoal prices --help")
        if self._unpowered:
            notes.append(
                f"no power is known for {_models(self._unpowered)}: energy that would include it "
                "is left out; give idle_watts and busy_watts in the price list"
            )
        if self.measured:
            notes.append(
                "energy is what GPUs measured, if they report it; otherwise a model estimates it"
            )
        return notes


def open_sums(
    store: LedgerStore,
    tariff: Tariff,
    book: Book,
    amounts: Mapping[Place, int],
    by: By,
    since: int,
    until: int,
    only: Only = EVERYBODY,
    draws: Mapping[Place, float] = MappingProxyType({}),
) -> list[Sum]:
    """The `book.open()` amounts of these hours, summed up as the store does it."""
    sums = []
    for place, amount in amounts.items():
        if since <= place.hour < until:
            job = book.cluster.jobs.get(place.job)
            owner = job.owner if job is not None else store.owner(place.job)
            tenant, user, name = (owner.tenant, owner.user, owner.name) if owner else ("",) * 3
            service = owner.service if owner else ""
            if only.given and not only.fits(tenant, user, place.job):
                continue
            keys: dict[By, str | int] = {
                By.ACCOUNT: "",
                By.TENANT: tenant,
                By.USER: user,
                By.JOB: place.job,
                By.NODE: place.node,
                By.SERVICE: service,
                By.DAY: place.hour // HOURS_PER_DAY * HOURS_PER_DAY,
                By.HOUR: place.hour,
            }
            rate = tariff.of_machine[store.machine_of(place.node)]
            label = name if by is By.JOB else ""
            energy = (amount, draws[place] * amount) if place in draws else ()
            sums.append(Sum(keys[by], label, rate, place.account, amount, *energy))
    return sums


def account_sums(tariff: Tariff, sums: Iterable[Sum], capacity: int) -> list[AccountSum]:
    totals: dict[Account, int] = {}
    moneys: dict[Account, Money] = {}
    for one in sums:
        totals[one.account] = totals.get(one.account, 0) + one.gpu_us
        before = moneys.get(one.account, NOTHING)
        moneys[one.account] = before.plus(tariff.money(one))
    told = []
    for account, (title, group, _) in ABOUT.items():
        if account in totals:
            cost, energy, co2 = moneys[account]
            told.append(
                AccountSum(
                    account=account.value,
                    title=title,
                    group=group,
                    gpu_us=totals[account],
                    gpu_ms=totals[account] / GPU_US_PER_GPU_MS,
                    share=totals[account] / capacity if capacity else 0.0,
                    cost=_told(cost),
                    energy_wh=_told(energy),
                    co2_g=_told(co2),
                )
            )
    return told


def rows(tariff: Tariff, sums: list[Sum], by: By, keys_max: int) -> list[LedgerRow]:
    """The largest keys first (times in order); those beyond `keys_max` become one: others."""
    sizes: dict[str | int, int] = {}
    for one in sums:
        sizes[one.key] = sizes.get(one.key, 0) + one.gpu_us
    ordered = sorted(sizes, key=lambda key: (-sizes[key], str(key)))
    if by in (By.DAY, By.HOUR):
        ordered = sorted(sizes, key=lambda key: int(key))
    place = {key: number for number, key in enumerate(ordered[:keys_max])}
    totals: dict[tuple[int, Account], int] = {}
    moneys: dict[tuple[int, Account], Money] = {}
    labels: dict[int, str] = {}
    for one in sums:
        at = (place.get(one.key, keys_max), one.account)
        totals[at] = totals.get(at, 0) + one.gpu_us
        spent = tariff.money(one)
        moneys[at] = moneys.get(at, NOTHING).plus(spent)
        labels[at[0]] = one.label
    order = {account: number for number, account in enumerate(ABOUT)}
    told = []
    for number, account in sorted(totals, key=lambda at: (at[0], order[at[1]])):
        cost, energy, co2 = moneys[number, account]
        others = number >= keys_max
        told.append(
            LedgerRow(
                key=OTHERS if others else _key(ordered[number], by, account),
                label="" if others else labels[number],
                account=account.value,
                gpu_us=totals[number, account],
                gpu_ms=totals[number, account] / GPU_US_PER_GPU_MS,
                cost=_told(cost),
                energy_wh=_told(energy),
                co2_g=_told(co2),
            )
        )
    return told


def view(
    tariff: Tariff,
    sums: list[Sum],
    *,
    by: By,
    from_ms: int,
    to_ms: int,
    began_ms: int,
    capacity: int,
    gpus: int,
    keys_max: int,
    notes: list[str],
    nap: Nap,
) -> LedgerView:
    told = rows(tariff, sums, by, keys_max)
    accounts = account_sums(tariff, sums, capacity)
    total = sum(account.gpu_us for account in accounts)
    if total != capacity:
        notes = [*notes, f"the books do not balance by {total - capacity} GPU-us: report this bug"]
    whole = whole_of(tariff, sums)
    return LedgerView(
        from_ms=from_ms,
        to_ms=to_ms,
        by=by,
        capacity_gpu_us=capacity,
        capacity_gpu_ms=capacity / GPU_US_PER_GPU_MS,
        rows=told,
        accounts=accounts,
        gpus=gpus,
        began_ms=max(0, began_ms),
        currency=tariff.prices.currency,
        cost=_told(whole.cost),
        energy_wh=_told(whole.energy_wh),
        co2_g=_told(whole.co2_g),
        notes=[*notes, *tariff.notes()],
        slept_ms=nap.slept_ms,
        lent_gpu_us=nap.lent_us,
        verdict=verdict(accounts, capacity, tariff.prices.currency, to_ms - max(from_ms, began_ms)),
    )


def verdict(accounts: list[AccountSum], capacity: int, currency: str, over_ms: int) -> str:
    """How much of the time was of use, and what the largest waste cost, in one sentence."""
    if not capacity:
        return "No GPU time was recorded in this period."
    used = sum(one.gpu_us for one in accounts if one.group == "used") / capacity
    text = f"Over {time_words(over_ms)}, {share_text(used)} of GPU time did useful work"
    wasted = [one for one in accounts if one.group == "wasted"]
    if not wasted:
        return f"{text}; nothing was wasted."
    worst = max(wasted, key=lambda one: one.gpu_us)
    cost = (
        f"cost {money_text(worst.cost, currency)}"
        if currency and worst.cost is not None
        else f"took {worst.gpu_us / GPU_US_PER_GPU_HOUR:,.1f} GPU-hours"
    )
    return f"{text}; {WASTE[Account(worst.account)]} {cost} ({share_text(worst.share)})."


def cost_view(tariff: Tariff, job: str, sums: list[Sum], nap: Nap) -> CostView:
    total = sum(one.gpu_us for one in sums)
    whole = whole_of(tariff, sums)
    return CostView(
        job=job,
        gpu_us=total,
        gpu_ms=total / GPU_US_PER_GPU_MS,
        accounts=account_sums(tariff, sums, total),
        currency=tariff.prices.currency,
        cost=_told(whole.cost),
        energy_wh=_told(whole.energy_wh),
        co2_g=_told(whole.co2_g),
        notes=tariff.notes(),
        slept_ms=nap.slept_ms,
        lent_gpu_us=nap.lent_us,
    )


def costs_by_key(tariff: Tariff, sums: Iterable[Sum]) -> dict[str, tuple[float, float | None]]:
    """The GPU time in ms and the money of each."""
    of_key: dict[str, list[Sum]] = {}
    for one in sums:
        of_key.setdefault(str(one.key), []).append(one)
    return {
        key: (
            sum(one.gpu_us for one in own) / GPU_US_PER_GPU_MS,
            _told(whole_of(tariff, own).cost),
        )
        for key, own in of_key.items()
    }


def gap_notes(gaps: Iterable[Gap], from_ms: int, to_ms: int) -> list[str]:
    """Notes on gaps within the range, the newest last."""
    notes = []
    for gap in gaps:
        if from_ms <= gap.at_ms < to_ms or from_ms <= gap.at_ms + gap.ms < to_ms:
            minutes = abs(gap.ms) / 60_000
            when = moment(gap.at_ms)
            if gap.ms < 0:
                notes.append(
                    f"the clock went back by {minutes:.1f} min at {when}: to count no time twice, "
                    "the ledger waited until the clock had caught up"
                )
            elif gap.booked:
                notes.append(
                    f"nothing was seen for {minutes:.0f} min from {when} (no controller, or a "
                    "clock jump): booked as it was before, corrected by what members reported later"
                )
            else:
                notes.append(
                    f"nothing is known about {minutes / 1440:.1f} days from {when} (no controller, "
                    "or a clock jump): they are in no account and not in the capacity"
                )
    return notes


def moment(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def whole_of(tariff: Tariff, sums: Iterable[Sum]) -> Money:
    whole = NOTHING
    for one in sums:
        whole = whole.plus(tariff.money(one))
    return whole


def _key(key: str | int, by: By, account: Account) -> str:
    if by is By.ACCOUNT:
        return account.value
    if by in (By.DAY, By.HOUR):
        return str(int(key) * HOUR_MS)
    return str(key)


def _models(models: Iterable[str]) -> str:
    named = [repr(model) if model else "GPUs without a model" for model in models]
    more = f" and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
    return ", ".join(named[:NAMED_MAX]) + more


def _told(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


# What each tenant has spent this month and in total, for the policy's budgets.


# Late bookings in older hours show up when these are summed up again, once an hour.
OPEN_HOURS = 2


def wants_spendings(policy: Policy) -> bool:
    return any(tenant.has_budget for tenant in policy.tenants)


def since_hour(period: BudgetPeriod, now_ms: int) -> int:
    if period is BudgetPeriod.TOTAL:
        return 0
    if period is BudgetPeriod.DAY:
        return now_ms // DAY_MS * HOURS_PER_DAY
    now = datetime.fromtimestamp(now_ms / 1000, UTC)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return int(month.timestamp() * 1000) // HOUR_MS


def resets_ms(period: BudgetPeriod, now_ms: int) -> int | None:
    """When the next period begins; None: never."""
    if period is BudgetPeriod.TOTAL:
        return None
    if period is BudgetPeriod.DAY:
        return (now_ms // DAY_MS + 1) * DAY_MS
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
    policy: Policy,
    tariff: Tariff,
    sums: Mapping[BudgetPeriod, Iterable[Sum]],
    tokens: Mapping[BudgetPeriod, Mapping[str, int]] = MappingProxyType({}),
) -> tuple[Spending, ...]:
    """For all tenants; those of the policy even if they have spent nothing. `tokens`: of each."""
    told = []
    for period, found in sums.items():
        amounts = {tenant.name: 0 for tenant in policy.tenants}
        costs: dict[str, Fraction] = {}
        unpriced: dict[str, int] = {}
        used = tokens.get(period, {})
        amounts |= {tenant: 0 for tenant in used if tenant and tenant not in amounts}
        for one in found:
            tenant = str(one.key)
            if tenant:
                amounts[tenant] = amounts.get(tenant, 0) + one.gpu_us
                cost = tariff.money(one).cost
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
                    tokens=used.get(tenant, 0),
                )
            )
    return tuple(told)
