"""Budgets: how much a tenant may spend, and how much it has spent according to the ledger."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]


class BudgetPeriod(enum.StrEnum):
    """The period that a budget covers."""

    MONTH = "month"  # calendar month, UTC
    TOTAL = "total"


class BudgetLevel(enum.StrEnum):
    """How much of its budget a tenant has used; under 80 % there is no level."""

    WARNED = "warned"  # 80 %
    HELD = "held"  # all of it: waiting jobs keep waiting


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant's own jobs, without those of its branches, have used in a period so far."""

    tenant: str
    period: BudgetPeriod
    gpu_us: int  # GPU-microseconds
    money_milli: int = 0  # thousandths of the currency, for time that has a price
    unpriced_us: int = 0  # the part of `gpu_us` that has no price
