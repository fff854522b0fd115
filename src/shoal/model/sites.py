"""A service in several clusters: what home knows of its other sites, and what they say."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec

from shoal.model.far import FAR_MAX, PEM_MAX, Far, SiteName

CLUSTERS_MAX = 8
HOME_SITE = "home"  # as the other sites call the cluster that has the service's record
SAID_MAX = 300

Said = Annotated[str, msgspec.Meta(max_length=SAID_MAX)]
Clusters = Annotated[tuple[SiteName, ...], msgspec.Meta(max_length=CLUSTERS_MAX)]
Doors = Annotated[tuple[Far, ...], msgspec.Meta(max_length=FAR_MAX)]


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """A service at a neighbor: a part of the service's record at home. `version`: may be there
    since `asked_ms`; `has`: the one that the neighbor has; `ready`: the last one that was ready
    there. 0: none. `door`: where its gateway is called. `said`: changes since it was asked."""

    version: int
    asked_ms: int
    has: int = 0
    ready: int = 0
    door: Far | None = None
    said: int = 0
    said_ms: int = 0


class SiteReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a neighbor says of a service of ours. `version`: that it has; 0: it has none of ours.
    `ready`: that version answers. `refused`: why it does not take the one that it was sent."""

    service: str
    version: int = 0
    ready: bool = False
    replicas: int = 0
    state: Annotated[str, msgspec.Meta(max_length=32)] = ""
    why: Said = ""
    refused: Said = ""
    ended: bool = False  # it is to end there, and has
    door: Far | None = None


class SiteWork(NamedTuple):
    """What a neighbor is to do for a service, by the state. `version`: of the spec; 0: what it has
    may stay as it is. `doors`: of the other sites but home."""

    service: str
    version: int
    has: int
    ends: bool
    doors: tuple[Far, ...]


class DoorView(msgspec.Struct, frozen=True, kw_only=True):
    """Where gateways of other clusters call this one, and what it shows them there."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    certificate: Annotated[str, msgspec.Meta(max_length=PEM_MAX)]


class SiteView(msgspec.Struct, kw_only=True):
    """A cluster that serves it, too. `state`: as it said last; empty: nothing is known. `version`:
    the last one that was ready there. `waits`: why it has not got the present one."""

    name: str
    state: str = ""
    version: int = 0
    replicas: int = 0
    address: str = ""
    why: str = ""
