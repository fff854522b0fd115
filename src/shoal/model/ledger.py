"""Reports of the ledger: where GPU time went, and what it cost."""

from __future__ import annotations

import enum

import msgspec


class By(enum.StrEnum):
    """What the rows of a report stand for."""

    ACCOUNT = "account"
    TENANT = "tenant"
    USER = "user"
    JOB = "job"
    NODE = "node"
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
