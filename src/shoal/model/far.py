"""A service in several clusters: its other sites, as the gateway of one of them reaches them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.job import JOB_NAME_PATTERN

FAR_MAX = 32  # other sites of one service
PEM_MAX = 8_192

SiteName = Annotated[str, msgspec.Meta(max_length=40, pattern=JOB_NAME_PATTERN)]


class Far(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`certificate` (PEM): what its door shows, and its gateway when it calls. `price`: of a GPU
    for an hour, in millionths; 0: not known."""

    site: SiteName
    address: Annotated[str, msgspec.Meta(max_length=45, pattern=r"^[0-9a-fA-F.:]+(?!\n)$")]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    certificate: Annotated[str, msgspec.Meta(max_length=PEM_MAX)]
    price: Annotated[int, msgspec.Meta(ge=0, le=10**12)] = 0


class SiteLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway sees of another site of a service. `rank`: its place in the order in which
    sites are asked; 1 is the first."""

    room: bool = False
    rank: int = 0
    in_flight: int = 0
    answers_per_ks: int = 0  # per thousand seconds
    round_trip_ms: int = 0  # there and back; 0: not known
    bytes_per_s: int = 0  # in both directions
    trouble: str = ""  # why it is not asked at all
