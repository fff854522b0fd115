"""Services in several clusters, as the API takes them: from users here, and from neighbors."""

from __future__ import annotations

import asyncio

import msgspec

from shoal.api.problems import Refusal, accepted
from shoal.api.reach import Reach
from shoal.control.loop import ControlLoop
from shoal.core.features.service.sites import named, sites_of
from shoal.model.access import OPEN
from shoal.model.report import SetSites
from shoal.model.service import Service, ServiceSpec
from shoal.model.sites import Doors, DoorView, SiteView
from shoal.ports import StoreError


def refuse_unknown_clusters(loop: ControlLoop, spec: ServiceSpec) -> None:
    """One that it is in already may have been declared gone meanwhile."""
    known = loop.state.services.get(spec.name)
    there = loop.neighboring.sites if loop.neighboring is not None else {}
    for name in named(spec):
        if name not in there and (known is None or name not in known.spec.clusters):
            message = f"there is no neighbor {name[:64]!r}; see: shoal neighbor list"
            raise Refusal(422, message, "clusters")


def guest_service(reach: Reach, spec: ServiceSpec) -> ServiceSpec:
    """A service of a neighbor: one hop, and none of our other tenants may call it unless everybody
    may. The neighbor's gateway comes by the door."""
    if spec.clusters:
        raise Refusal(422, "is not for services of neighbors, which run here", "clusters")
    if spec.way.access == (OPEN,):
        return spec
    route = msgspec.structs.replace(spec.way, access=(reach.who.tenant,))
    return msgspec.structs.replace(spec, route=route)


async def tell_sites(reach: Reach, name: str, doors: Doors) -> DoorView:
    from shoal.control.neighboring.door import certificate_in, plain

    reach.service(name)
    if not reach.who.only:
        raise Refusal(422, "is told by the neighbor that has the service here", "doors")
    if len({one.site for one in doors}) < len(doors):
        raise Refusal(422, "names a site twice", "doors")
    try:
        plain_doors = tuple(plain(one) for one in doors)
    except ValueError as error:
        raise Refusal(422, str(error), "doors") from None
    loop = reach.loop
    try:
        port, pem = await asyncio.to_thread(loop.door)
        certificate = certificate_in(pem)
    except (StoreError, ValueError) as error:
        raise Refusal(503, f"this cluster has no door for gateways: {error}") from None
    accepted(await loop.request(SetSites(name, plain_doors, reach.name, reach.tenant)))
    return DoorView(port=port, certificate=certificate)


def site_views(reach: Reach, service: Service, *, why: bool = True) -> list[SiteView]:
    found = sites_of(reach.loop.state, service)
    for one in found:
        one.why = reach.text(one.why) if why else ""
    return found
