"""Where a job is that a neighbor has: a part of the job's record; and jobs that were given up."""

from __future__ import annotations

import msgspec

STRAYS_MAX = 10_000  # the oldest are forgotten: their neighbors are gone for good


class Stray(msgspec.Struct, frozen=True, kw_only=True):
    """A hand-over that was given up: the neighbor is told to end it, until it says that it has.
    `since_ms`, `gpus`, `price`: what bounds what can be owed for it, by `tenant`."""

    neighbor: str
    job: str
    attempt: int
    since_ms: int
    gpus: int
    tenant: str = ""
    price: int | None = None


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job of ours is. A fact; the key of the hand-over follows from it. `until_there_ms`
    and `until_here_ms`: its lease by the host's clock, and when it is over for certain by ours."""

    neighbor: str
    since_ms: int
    start_ms: int = 0  # as offered, from then on
    price: int | None = None
    id: str = ""
    taken_ms: int = 0  # since when it has that
    running_ms: int | None = None
    until_there_ms: int = 0
    until_here_ms: int = 0
    withdrawn: str = ""  # why it is to come back; it may have ended well before that
    cancelled: bool = False  # it is not wanted any more, here or there
