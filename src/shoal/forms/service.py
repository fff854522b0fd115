"""From the fields of a service, as people write them, to a ServiceSpec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.forms.datafile import invalid
from shoal.forms.failure import BadField
from shoal.forms.fields import REPLICA, SERVICE, SERVICE_PRIORITY, read_all
from shoal.forms.job import to_spec
from shoal.model.service import Routing, Scale, ServiceSpec, problem_with_service


def to_service(given: Mapping[str, Any]) -> ServiceSpec:
    """A ServiceSpec that the controller accepts, as far as that is known without the cluster."""
    if "name" not in given:
        raise BadField("name", "is missing; name the service, e.g. name: chat")
    of_replica = {name: value for name, value in given.items() if name in ("command", *REPLICA)}
    own = {name: value for name, value in given.items() if name not in of_replica}
    whole: dict[str, Any] = {"scale": {}, "probe": {}, "route": {}}
    for target, value in read_all(SERVICE, own).items():
        part, _, field = target.rpartition(".")
        (whole[part] if part else whole)[field] = value
    whole["replica"] = to_spec({"priority": SERVICE_PRIORITY, **of_replica})
    route = whole.pop("route")
    if route:
        _settle_route(route)
        concurrency = whole["scale"].get("target", Scale().target)
        whole["route"] = {"service": whole["name"], "concurrency": concurrency, **route}
    try:
        spec = msgspec.convert(whole, ServiceSpec)
    except msgspec.ValidationError as error:  # the types are stricter than the readers
        raise invalid(error) from None
    problem = problem_with_service(spec)
    if problem is not None:
        raise BadField(*problem)
    return spec


def _settle_route(route: dict[str, Any]) -> None:
    """A header or cookie alone means: sticky."""
    named = [name for name in ("sticky_header", "sticky_cookie") if name in route]
    routing = route.setdefault("routing", Routing.STICKY if named else Routing.LEAST_LOADED)
    if len(named) > 1:
        raise BadField("sticky_cookie", "cannot be used beside sticky_header; leave one out")
    if routing == Routing.STICKY and not named:
        raise BadField(
            "route", "sticky needs a header or cookie; add sticky_header or sticky_cookie"
        )
    if named and routing != Routing.STICKY:
        raise BadField(named[0], f"has no effect with route: {routing}; leave one out")
    if "certificate" in route and "port" not in route:
        raise BadField("certificate", "needs a port of the service's own; add e.g. port: 8443")
