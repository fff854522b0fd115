"""Neighbors as people and scripts see them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.neighbor import NeighborName

URL_CHARACTERS_MAX = 300


class NewNeighbor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`token`: as the neighbor's `shoal neighbor invite` prints it. What follows its dot is the
    fingerprint of the certificate that the neighbor must show; without it, the system decides whom
    to trust."""

    url: Annotated[str, msgspec.Meta(max_length=URL_CHARACTERS_MAX)]
    token: Annotated[str, msgspec.Meta(max_length=400)]

    def __repr__(self) -> str:  # a traceback must not show the token
        return f"NewNeighbor({self.url!r})"


class ThereView(msgspec.Struct, kw_only=True):
    """A job of ours there. `id`: its name there; empty: it is not known to have come. `state`: as
    the neighbor said last. `price`: for a GPU and an hour, as offered."""

    job: str
    id: str
    state: str
    since_ms: int
    gpus: int
    running_ms: int | None = None
    price: float | None = None
    withdrawn: str = ""


class NeighborView(msgspec.Struct, kw_only=True):
    """A cluster to which jobs may go. What it says of itself is as it was `heard_ms_ago`; -1: it
    has not said anything since this controller started. GPUs are those that jobs of ours may have.
    `waiting`: jobs in its queue. `price`: the lowest for a GPU and an hour; None: not known."""

    name: NeighborName
    url: str
    cluster: str
    version: str = ""
    gpus: int = 0
    gpus_free: int = 0
    waiting: int = 0
    price: float | None = None
    currency: str = ""
    labels: dict[str, str] = {}
    round_trip_ms: int = 0
    heard_ms_ago: int = -1
    problem: str = ""
    count: int = 0  # jobs of ours there, also those that the sender may not see
    jobs: list[ThereView] = []


class GoneView(msgspec.Struct, kw_only=True):
    """What it would mean to declare the neighbor gone, in words; and the jobs that it concerns."""

    name: str
    lines: list[str]
    jobs: list[str]
