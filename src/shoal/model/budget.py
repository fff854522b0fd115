"""Budgets: what a tenant may spend, and what the ledger says that it has spent."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

Amount = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000_000)]


class BudgetPeriod(enum.StrEnum):
    """What a budget is for."""

    MONTH = "month"  # by the calendar, in UTC
    TOTAL = "total"


class BudgetLevel(enum.StrEnum):
    """How much of its budget a tenant has used; below, nothing is said."""

    WARNED = "warned"  # 80 %
    HELD = "held"  # all of it: what waits goes on waiting


class Spending(msgspec.Struct, frozen=True, kw_only=True):
    """What the jobs of a tenant, without those of its branches, took in a period so far."""

    tenant: str
    period: BudgetPeriod
    gpu_us: int  # GPU-microseconds
    money_milli: int = 0  # thousandths of the currency, for what has a price
    unpriced_us: int = 0  # of `gpu_us`, what has none
