"""What the ledger tells: where GPU time went, and what it cost."""

from __future__ import annotations

import enum

import msgspec


class By(enum.StrEnum):
    """What a report has a row for."""

    ACCOUNT = "account"
    TENANT = "tenant"
    USER = "user"
    JOB = "job"
    NODE = "node"
    DAY = "day"
    HOUR = "hour"


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """An amount in one account. `cost` and `energy_wh` are None where a price or a power is not
    known for all of it: a part of a sum is never passed off as the sum."""

    key: str  # a tenant, user, job or node; the start in ms of a day or hour; "" is nobody's
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
    began_ms: int = 0  # the ledger knows nothing before
    currency: str = ""
    cost: float | None = None
    energy_wh: float | None = None
    co2_g: float | None = None
    notes: list[str] = []  # what a reader should know, a line each


class CostView(msgspec.Struct, frozen=True, kw_only=True):
    """What one job has taken so far."""

    job: str
    gpu_us: int
    gpu_ms: float
    accounts: list[AccountSum]
    currency: str = ""
    cost: float | None = None
    energy_wh: float | None = None
    co2_g: float | None = None
    notes: list[str] = []
