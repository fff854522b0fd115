"""Budgets: how much a tenant may spend, and how much it has spent according to the ledger."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]


class BudgetPeriod(enum.StrEnum):
    """The period that a budget covers."""

    DAY = "day"  # calendar day and month, UTC
    MONTH = "month"
    TOTAL = "total"


class BudgetLevel(enum.StrEnum):
    """How much of its budget a tenant has used; under 80 % there is no level."""

    WARNED = "warned"  # 80 %
    HELD = "held"  # all of it: waiting jobs keep waiting


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant's own jobs and keys, without those of its branches, have used in a period so
    far. With a `key`: what was used with this key alone, and how much may be until `until_ms`."""

    tenant: str
    period: BudgetPeriod
    gpu_us: int  # GPU-microseconds
    money_milli: int = 0  # thousandths of the currency, for time that has a price
    unpriced_us: int = 0  # the part of `gpu_us` that has no price
    tokens: int = 0  # of prompts, cached or not, and generated ones
    key: str = ""
    limit: int = 0  # tokens
    until_ms: int = 0


class BudgetGauge(msgspec.Struct, frozen=True, kw_only=True):
    """`per_hour`: what the GPUs that are held now use. `ends_ms`: when the rest is used up at this
    rate; None: never."""

    unit: str  # GPU-hours, or the currency
    used: float
    limit: float
    per_hour: float
    ends_ms: int | None


class BudgetView(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant and its branches have used of their budget so far. `share` is that of the
    fullest gauge. `waiting`: their jobs that wait while a budget holds them."""

    tenant: str
    period: BudgetPeriod
    level: BudgetLevel | None
    share: float
    warns_at: float
    resets_ms: int | None  # None: never
    gpus: float  # held now
    waiting: int
    gauges: list[BudgetGauge]
    text: str
