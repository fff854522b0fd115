"""The fields of a service as people write them: those of its replicas, and its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from shoal.forms import units
from shoal.forms.jobfields import (
    FIELDS,
    BadJob,
    amount,
    one_of,
    plain_text,
    to_spec,
    whole_number,
    wrong,
)
from shoal.model.service import (
    HEADER_NAME_PATTERN,
    PLAIN_PATTERN,
    SERVICE_NAME_PATTERN,
    Routing,
    Scale,
    ServiceSpec,
    problem_with_service,
)

REPLICAS_MAX = 10_000
DAY_MS = 86_400_000
PRIORITY = 100  # who waits for an answer waits less gladly than a training run
# A replica is one process that runs until it is told to end: other fields of a job say nothing.
REPLICA_FIELDS = (
    "command",
    "gpus",
    "gpu_memory",
    "gpu_model",
    "cpus",
    "memory",
    "tenant",
    "priority",
    "stop_grace",
    "env",
    "workdir",
    "pack",
    "requirements",
)


def to_service(fields: Mapping[str, Any]) -> ServiceSpec:
    """Fields in the friendly form -> a ServiceSpec as the controller wants it."""
    if "name" not in fields:
        raise BadJob("name", "is missing; name the service, e.g. name: chat")
    own: dict[str, dict[str, Any]] = {"": {}, "scale": {}, "probe": {}, "route": {}}
    for name, field in OWN_FIELDS.items():
        if name in fields:
            own[field.part] |= field.read(name, fields[name])
    replica = {name: fields[name] for name in REPLICA_FIELDS if name in fields}
    whole: dict[str, Any] = {
        **own[""],
        "replica": to_spec({"priority": PRIORITY, **replica}),
        "scale": own["scale"],
        "probe": own["probe"],
    }
    if own["route"]:
        _settle_route(own["route"])
        target = own["scale"].get("target", Scale().target)
        whole["route"] = {"service": whole["name"], "concurrency": target, **own["route"]}
    try:
        spec = msgspec.convert(whole, ServiceSpec)
    except msgspec.ValidationError as error:  # the types are stricter than the readers below
        raise BadJob("", str(error).replace("`", "")) from None
    problem = problem_with_service(spec)
    if problem is not None:
        raise BadJob(*problem)
    return spec


def _settle_route(route: dict[str, Any]) -> None:
    """A header or cookie alone means: sticky."""
    named = [name for name in ("sticky_header", "sticky_cookie") if name in route]
    routing = route.setdefault("routing", Routing.STICKY if named else Routing.LEAST_LOADED)
    if len(named) > 1:
        raise BadJob("sticky_cookie", "cannot be used beside sticky_header; leave one out")
    if routing is Routing.STICKY and not named:
        raise BadJob("route", "sticky needs to know by what; add sticky_header or sticky_cookie")
    if named and routing is not Routing.STICKY:
        raise BadJob(named[0], f"has no effect with route: {routing}; leave one out")
    if "certificate" in route and "port" not in route:
        raise BadJob("certificate", "needs a port of the service's own; add e.g. port: 8443")


# -- fields -------------------------------------------------------------------------------


class OwnField(NamedTuple):
    """Where it belongs in a ServiceSpec; `read` gives a table of what it stands for there."""

    part: str
    read: Callable[[str, Any], dict[str, Any]]


def _name(field: str, value: Any) -> dict[str, Any]:
    text = plain_text(field, value)
    if len(text) > 63 or not re.fullmatch(SERVICE_NAME_PATTERN[1:-1], text):
        fix = "use up to 63 small letters, digits and '-', which neither begins nor ends it"
        raise BadJob(field, f"{units.quoted(text)} will not do, for it is part of a URL; {fix}")
    if re.fullmatch(r"j[0-9]+", text):
        raise BadJob(field, f"{text} looks like the id of a job; choose another, e.g. chat")
    return {"name": text}


_count = whole_number(0, REPLICAS_MAX, "replicas")


def _replicas(field: str, value: Any) -> dict[str, Any]:
    """A number, or the least and the most: 1..8."""
    if not isinstance(value, str):
        least = most = _count(field, value)
    else:
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:\.\.\s*([0-9]{1,9})\s*)?", value)
        if match is None:
            message = f"{units.quoted(value)} is no number of replicas"
            raise BadJob(field, f"{message}; write 2, or 1..8, or 0..4 to sleep when idle")
        least = _count(field, int(match[1]))
        most = least if match[2] is None else _count(field, int(match[2]))
    if most < least:
        raise BadJob(field, f"{least}..{most} is upside down; write {most}..{least}")
    if not most:
        raise BadJob(field, "none at all would never serve; write 0..1 to sleep when idle")
    return {"least": least, "most": most}


def _path(field: str, value: Any) -> dict[str, Any]:
    text = plain_text(field, value)
    if not text.startswith("/") or len(text) > 255 or not re.fullmatch(PLAIN_PATTERN[1:-1], text):
        raise BadJob(field, f"{units.quoted(text)} is not a path such as /health")
    return {"path": text}


def _header(field: str, value: Any) -> dict[str, Any]:
    text = plain_text(field, value)
    if not 0 < len(text) <= 64 or not re.fullmatch(HEADER_NAME_PATTERN[1:-1], text):
        raise BadJob(field, f"{units.quoted(text)} cannot name one; write e.g. x-session")
    return {field: text}


def _certificate(field: str, value: Any) -> dict[str, Any]:
    text = plain_text(field, value)
    if not text or len(text) > 255 or not re.fullmatch(PLAIN_PATTERN[1:-1], text):
        fix = "name a PEM file whose path has only letters, digits and ._:/@+,=-"
        raise BadJob(field, f"{units.quoted(text)} will not do; {fix}")
    return {field: text}


def _number(target: str, least: int, most: int, sense: str) -> Callable[[str, Any], dict[str, Any]]:
    read_number = whole_number(least, most, sense)

    def read(field: str, value: Any) -> dict[str, Any]:
        return {target: read_number(field, value)}

    return read


def _time(target: str, example: str) -> Callable[[str, Any], dict[str, Any]]:
    read_amount = amount(units.duration_ms, DAY_MS, example)

    def read(field: str, value: Any) -> dict[str, Any]:
        found = read_amount(field, value)
        if not found:
            raise BadJob(field, f"must be some time; write e.g. {example}")
        return {target: found}

    return read


def _route(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, str):
        raise wrong(field, value, f"one of {', '.join(Routing)}")
    return {"routing": one_of(Routing)(field, value)}


OWN_FIELDS: dict[str, OwnField] = {
    "name": OwnField("", _name),
    "replicas": OwnField("scale", _replicas),
    "target": OwnField("scale", _number("target", 1, 100_000, "requests at a replica at a time")),
    "idle": OwnField("scale", _time("idle_ms", "5m or 30s")),
    "probe": OwnField("probe", _path),
    "ready_within": OwnField("probe", _time("start_ms", "10m or 90s")),
    "probe_every": OwnField("probe", _time("every_ms", "10s or 1m")),
    "probe_failures": OwnField("probe", _number("failures", 1, 1_000, "probes without an answer")),
    "route": OwnField("route", _route),
    "sticky_header": OwnField("route", _header),
    "sticky_cookie": OwnField("route", _header),
    "queue": OwnField("route", _number("queue_max", 1, 100_000, "requests that may wait")),
    "rate": OwnField("route", _number("rate_per_s", 1, 1_000_000, "requests per s of a tenant")),
    "port": OwnField("route", _number("port", 1, 65_535, "a port of its own")),
    "certificate": OwnField("route", _certificate),
    "drain": OwnField("", _time("drain_ms", "60s or 10m")),
}
SERVICE_FIELDS = (*OWN_FIELDS, *REPLICA_FIELDS)
assert set(REPLICA_FIELDS) <= set(FIELDS)
