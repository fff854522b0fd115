"""Reports of the ledger: where GPU time went, and what it cost."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec


class By(enum.StrEnum):
    """What the rows of a report stand for."""

    ACCOUNT = "account"
    TENANT = "tenant"
    USER = "user"
    JOB = "job"
    NODE = "node"
    SERVICE = "service"
    DAY = "day"
    HOUR = "hour"


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """An amount in one account. `cost` and `energy_wh` are None unless the price or power is known
    for all of it: a partial sum is never shown as the sum."""

    key: str  # a tenant, user, job or node; the start in ms of a day or hour; "": no owner
    account: str
    gpu_us: int  # GPU-microseconds: exact
    gpu_ms: float
    label: str = ""
    cost: float | None = None
    energy_wh: float | None = None
    co2_g: float | None = None


class AccountSum(msgspec.Struct, frozen=True, kw_only=True):
    """One account over the whole range. `share` is of the capacity."""

    account: str
    title: str
    group: str
    gpu_us: int
    gpu_ms: float
    share: float
    cost: float | None = None
    energy_wh: float | None = None
    co2_g: float | None = None


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a service that a caller used; by day or hour, those of all callers."""

    service: str
    key: str = ""  # the start in ms of a day or hour
    owner: str = ""  # the tenant of the service
    caller: str = ""  # the id of a key; "": without one
    tenant: str = ""  # of the key
    requests: int
    prompt: int  # with those that were cached
    cached: int
    generated: int


class TokenCost(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens of a service, and the GPU time of its replicas. Each of the last two is the whole
    cost: divided by the tokens generated, and by those computed, which are the generated ones and
    those of prompts that were not cached. None: not known."""

    service: str
    requests: int
    prompt: int
    cached: int
    generated: int
    gpu_us: int
    cost: float | None
    per_million_generated: float | None
    per_million_computed: float | None


class OwedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a neighbor has run for a tenant of ours, as it has counted it. `cost`: in its currency;
    0: it has named no price."""

    neighbor: str
    tenant: str
    jobs: int
    gpu_ms: int
    cost: float


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """Whole hours (UTC) from `from_ms` until `to_ms`, or until now. The rows add up to the
    capacity: GPUs known x time known."""

    from_ms: int
    to_ms: int
    by: By
    capacity_gpu_us: int
    capacity_gpu_ms: float
    rows: list[LedgerRow]
    accounts: list[AccountSum]
    gpus: int = 0  # known now
    began_ms: int = 0  # the ledger has nothing from before
    currency: str = ""
    cost: float | None = None
    energy_wh: float | None = None
    co2_g: float | None = None
    notes: list[str] = []  # remarks for the reader, one line each
    # A memo, not part of the sum: how long jobs were asleep, and the GPU time that they lent out.
    slept_ms: int = 0
    lent_gpu_us: int = 0
    verdict: str = ""  # the whole in one sentence
    tokens: list[TokenRow] = []  # the largest first, or in order of time; no part of the sum
    token_costs: list[TokenCost] = []
    owed: list[OwedRow] = []  # the most GPU time first; no part of the sum


class CostView(msgspec.Struct, frozen=True, kw_only=True):
    """What one job has used so far."""

    job: str
    gpu_us: int
    gpu_ms: float
    accounts: list[AccountSum]
    currency: str = ""
    cost: float | None = None
    energy_wh: float | None = None
    co2_g: float | None = None
    notes: list[str] = []
    slept_ms: int = 0  # a memo, not part of the sum: how long it was asleep
    lent_gpu_us: int = 0  # the GPU time that it did not hold meanwhile


# A price list: what a GPU or a node costs, in money, power and grams of CO2.


Amount = Annotated[float, msgspec.Meta(ge=0, le=1_000_000_000_000)]
Years = Annotated[float, msgspec.Meta(gt=0, le=100)]
Name = Annotated[str, msgspec.Meta(max_length=255)]
ANY = "*"
HOURS_PER_YEAR = 8760
MONTHS_PER_YEAR = 12


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rented: `per_hour`. Owned: `purchase` over `life_years`, and `per_month`. They add up."""

    per_hour: Amount | None = None
    purchase: Amount | None = None
    life_years: Years | None = None
    per_month: Amount | None = None
    idle_watts: Amount | None = None
    busy_watts: Amount | None = None

    @property
    def priced(self) -> bool:
        return not self.per_hour is self.purchase is self.per_month is None


class PriceList(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`gpus` are priced each, by model; `nodes` whole, by name or a pattern like `rack1-*`. A node
    costs the sum of both. `*` is any model or node that is not named."""

    currency: Annotated[str, msgspec.Meta(max_length=12)] = ""
    pue: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1
    co2_g_per_kwh: Annotated[float, msgspec.Meta(ge=0, le=10_000)] | None = None
    gpus: Annotated[dict[Name, Price], msgspec.Meta(max_length=1000)] = {}
    nodes: Annotated[dict[Name, Price], msgspec.Meta(max_length=10_000)] = {}


def problem_with(prices: PriceList) -> str | None:
    """What is wrong beyond what the types refuse, as `field: sentence`; None if nothing is."""
    for table, entries in (("gpus", prices.gpus), ("nodes", prices.nodes)):
        for name, price in entries.items():
            where = f"{table}.{name}"
            if (price.purchase is None) != (price.life_years is None):
                missing = "life_years" if price.life_years is None else "purchase"
                return f"{where}.{missing}: is missing; give purchase and life_years, or neither"
            if (price.idle_watts is None) != (price.busy_watts is None):
                missing = "busy_watts" if price.busy_watts is None else "idle_watts"
                return f"{where}.{missing}: is missing; give idle_watts and busy_watts, or neither"
            if table == "nodes" and price.idle_watts is not None:
                return f"{where}.idle_watts: is for GPUs; write it under gpus"
            if price.busy_watts is not None and price.busy_watts < (price.idle_watts or 0):
                return f"{where}.busy_watts: is less than idle_watts"
            if price == Price():
                return f"{where}: is empty; set per_hour, or purchase and life_years"
    if (prices.gpus or prices.nodes) and not prices.currency:
        named = [*prices.gpus.values(), *prices.nodes.values()]
        if any(price.priced for price in named):
            return "currency: is missing; write it as a name, e.g. currency: EUR"
    return None
