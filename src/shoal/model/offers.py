"""What a cluster offers to a neighbor that has jobs to hand over."""

from __future__ import annotations

import msgspec

OFFERS_MAX = 32


class Offer(msgspec.Struct, kw_only=True):
    """Of one job. It has probably started `start_ms` from now, and not before `early_ms`; 0: at
    once. None: that is not known, or it never would, as `why` says. `price`: of a GPU for an hour,
    the highest of those that the job may get; None: not known."""

    start_ms: int | None = None
    early_ms: int | None = None
    why: str = ""
    price: float | None = None


class OffersView(msgspec.Struct, kw_only=True):
    """`now_ms` is this cluster's clock, `cluster` its id. GPUs are those that the sender's `tenant`
    may have; `labels` are what the policy tells neighbors, such as region=eu. `waiting`: jobs in
    the queue. `price`: the lowest of a GPU for an hour; None: not known."""

    offers: list[Offer]
    now_ms: int
    version: str
    gpus: int
    gpus_free: int
    currency: str = ""
    labels: dict[str, str] = {}
    cluster: str = ""
    tenant: str = ""
    waiting: int = 0
    price: float | None = None
