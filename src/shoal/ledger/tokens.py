"""Tokens in the book: what routers have counted since it heard of them last. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from shoal.ledger.accounts import HOUR_MS, Meter, Sum, Tokens
from shoal.ledger.postings import Postings
from shoal.ledger.report import OPEN_HOURS, OTHERS, Tariff, resets_ms, since_hour, whole_of
from shoal.ledger.store import LedgerStore
from shoal.model.budget import BudgetPeriod, Spending
from shoal.model.ledger import By, TokenCost, TokenRow
from shoal.model.service import ServiceLoad
from shoal.model.tokens import TokenCount

FOLDERS_KEPT = 64  # of routers: one for each head's gateway, and those that were made again


class Parties(NamedTuple):
    """The tenant that owns the service, and the one whose key it is."""

    owner: str
    tenant: str


Who = Callable[[str, str], Parties]  # of a service and a caller


def nobody(service: str, caller: str) -> Parties:  # noqa: ARG001
    return Parties("", "")


def hear_tokens(postings: Postings, load: ServiceLoad, who: Who) -> None:
    """Books what was added to the counts, in the present hour. Counts are cumulative, so the next
    look makes up for one that was missed. In a new folder they began at 0. A router that was killed
    may go back to what it wrote last: that is booked, and it counts on from there."""
    folders: dict[str, list[TokenCount]] = {}
    for count in load.token_counts:
        folders.setdefault(count.folder, []).append(count)
    for folder, counts in folders.items():
        heard = postings.cluster.tokens
        heard[folder] = known = heard.pop(folder, {})  # the last is the one heard of last
        while len(heard) > FOLDERS_KEPT:
            del heard[next(iter(heard))]
        known[load.service] = _booked(postings, load.service, counts, known, who)


def _booked(
    postings: Postings,
    service: str,
    counts: Iterable[TokenCount],
    known: dict[str, dict[str, Tokens]],
    who: Who,
) -> dict[str, Tokens]:
    before, heard, adds = known.get(service, {}), {}, postings.adds.tokens
    hour = postings.cluster.now_ms // postings.hour_ms
    for one in counts:
        heard[one.caller] = now = Tokens(one.requests, one.prompt, one.cached, one.generated)
        added = now.since(before.get(one.caller, Tokens()))
        if any(added):
            owner, tenant = who(service, one.caller)
            key = hour, Meter(service, owner, one.caller, tenant)
            adds[key] = adds.get(key, Tokens()).plus(added)
    return heard


# What tenants and keys have used of their budgets and quotas.


class Quota(NamedTuple):
    """How many tokens may be used with a key in a period."""

    key: str
    tenant: str
    tokens: int
    period: BudgetPeriod


class SpentTokens:
    """As `Spent`: old hours are summed up once an hour, the newest every time."""

    def __init__(self) -> None:
        self._closed: dict[BudgetPeriod, tuple[tuple[int, int], dict[tuple[str, str], int]]] = {}

    def sums(
        self, store: LedgerStore, period: BudgetPeriod, now_ms: int
    ) -> dict[tuple[str, str], int]:
        """By caller and tenant, in this period."""
        hour, since = now_ms // HOUR_MS, since_hour(period, now_ms)
        key = since, max(since, hour - OPEN_HOURS)
        known, closed = self._closed.get(period, (None, {}))
        if known != key:
            closed = store.spent_tokens(*key)
            self._closed[period] = key, closed
        found = dict(closed)
        for who, tokens in store.spent_tokens(key[1], hour + 1).items():
            found[who] = found.get(who, 0) + tokens
        return found


def by_tenant(sums: Mapping[tuple[str, str], int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (_, tenant), tokens in sums.items():
        found[tenant] = found.get(tenant, 0) + tokens
    return found


def of_keys(
    quotas: Iterable[Quota], sums: Mapping[BudgetPeriod, Mapping[tuple[str, str], int]], now_ms: int
) -> tuple[Spending, ...]:
    return tuple(
        Spending(
            tenant=one.tenant,
            period=one.period,
            gpu_us=0,
            tokens=sums[one.period].get((one.key, one.tenant), 0),
            key=one.key,
            limit=one.tokens,
            until_ms=resets_ms(one.period, now_ms) or 0,
        )
        for one in quotas
    )


# Reports: who used how many, and what a million of them cost.


class TokenReport(NamedTuple):
    rows: list[TokenRow]
    services: list[TokenCost]


NO_TOKENS = TokenReport([], [])


def token_report(
    tariff: Tariff,
    found: list[tuple[int, Meter, Tokens]],
    sums: Iterable[Sum],
    by: By,
    keys_max: int,
    tenant: str | None,
) -> TokenReport:
    """`sums`: GPU time by service. `tenant`: a reader that sees its own calls, and the sums of its
    own services."""
    rows: dict[tuple[int, Meter], Tokens] = {}
    services: dict[str, Tokens] = {}
    for key, meter, amount in found:
        service = meter.service
        seen = tenant in (None, meter.tenant)
        whose = meter if seen else Meter(service, meter.owner, OTHERS, "")
        at = key, (Meter(service, "", "", "") if by in (By.DAY, By.HOUR) else whose)
        rows[at] = rows.get(at, Tokens()).plus(amount)
        if tenant in (None, meter.owner):
            services[service] = services.get(service, Tokens()).plus(amount)
    ordered = sorted(rows, key=lambda at: (at[0], -sum(rows[at][1:]), at[1]))
    kept = {at: rows[at] for at in ordered[:keys_max]}
    for at in ordered[keys_max:]:
        rest = 0, Meter("", "", OTHERS, "")
        kept[rest] = kept.get(rest, Tokens()).plus(rows[at])
    return TokenReport(
        [
            TokenRow(
                key=str(key * HOUR_MS) if by in (By.DAY, By.HOUR) else "",
                **meter._asdict(),
                **amount._asdict(),
            )
            for (key, meter), amount in kept.items()
        ],
        [_token_cost(tariff, name, services[name], sums) for name in sorted(services)],
    )


def _token_cost(tariff: Tariff, service: str, amount: Tokens, sums: Iterable[Sum]) -> TokenCost:
    """All GPU time of its replicas, busy or not, starting or serving, is the cost of its tokens."""
    own = [one for one in sums if one.key == service]
    cost = whole_of(tariff, own).cost if own and tariff.prices.currency else None
    computed = amount.prompt - amount.cached + amount.generated

    def per_million(count: int) -> float | None:
        return None if cost is None or not count else float(cost * 1_000_000 / count)

    return TokenCost(
        service=service,
        **amount._asdict(),
        gpu_us=sum(one.gpu_us for one in own),
        cost=None if cost is None else float(cost),
        per_million_generated=per_million(amount.generated),
        per_million_computed=per_million(computed),
    )
