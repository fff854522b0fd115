"""From the fields of a job or a service, as people write them, to its spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.core.phases.spec_problem import spec_problem
from shoal.forms.datafile import invalid
from shoal.forms.failure import BadField
from shoal.forms.fields import JOB, REPLICA, SERVICE, SERVICE_PRIORITY, read_all
from shoal.forms.readers import EACH_GPU
from shoal.model.job import MEMBERS_MAX, JobSpec, Restart, Within
from shoal.model.resources import plural
from shoal.model.service import Routing, Scale, ServiceSpec, problem_with_service

SWEEP = "sweep."


def to_spec(given: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> JobSpec:
    """A JobSpec that the controller accepts, as far as that is known without the cluster. `more`
    are parts of it that no field sets, such as the package."""
    ready = {**read_all(JOB, given), **(more or {})}
    if "command" not in ready:
        raise BadField("command", "is missing; say what to run, e.g. command: python train.py")
    _settle_restart(ready)
    _settle_gpus(given, ready)
    _settle_nodes(ready)
    _settle_launcher(ready)
    _settle_processes(ready)
    _settle_places(ready)
    _settle_sweep(ready)
    try:
        spec = msgspec.convert(ready, JobSpec)
    except msgspec.ValidationError as error:
        raise invalid(error, field_of) from None
    problem = spec_problem(spec)
    if problem is not None:
        raise BadField(problem.field, problem.message)
    return spec


def field_of(path: str) -> str:
    """The field that people know, by the name of what it sets in the spec."""
    parts = [part.split("[")[0] for part in path.split(".")]
    target = ".".join(parts[: 1 + (parts[0] == "sweep")])
    return next((name for name, field in JOB.items() if target in field.targets.split()), "")


def _settle_restart(ready: dict[str, Any]) -> None:
    """Retries alone mean: run it again when it fails."""
    if not ready.get("retries"):
        return
    restart = ready.setdefault("restart", Restart.ON_FAILURE)
    if restart != Restart.ON_FAILURE:
        message = f"have no effect with restart: {restart}; leave one out, or use on-failure"
        raise BadField("retries", message)


def _settle_gpus(given: Mapping[str, Any], ready: dict[str, Any]) -> None:
    """A wish about GPUs makes sense only with GPUs."""
    if ready.get("gpu_milli") == 0 and "gpu_memory" in given:
        raise BadField("gpu_memory", "is in gpus already; leave it out, or write gpus: 1")
    for name, target in (("gpu_memory", "gpu_memory_mb"), ("gpu_model", "gpu_models")):
        if ready.get(target) and not ready.get("gpus"):
            raise BadField(name, "has no effect without GPUs; say how many, e.g. gpus: 1")


def _settle_nodes(ready: dict[str, Any]) -> None:
    """Members, one on each node; or, with `procs_per_node`, that many on each."""
    if "nodes" not in ready:
        return
    for target, name in (("members", "members"), ("members_per_node", "per_node")):
        if target in ready:
            raise BadField("nodes", f"means so many members, one per node; leave out {name}")
    ready["members"], ready["members_max"] = ready.pop("nodes"), ready.pop("nodes_max", 0)
    if ready.get("processes", 1) == 1:
        ready["members_per_node"] = 1


def _settle_launcher(ready: dict[str, Any]) -> None:
    """A launcher starts as many processes on a node as it likes, in the one member there."""
    if not ready.get("launcher"):
        return
    if ready.get("processes", 1) != 1 or ready.get("members_per_node", 1) != 1:
        message = "starts the processes of a node itself; leave out per_node and procs_per_node"
        raise BadField("launcher", message)
    ready["members_per_node"] = 1


def _settle_processes(ready: dict[str, Any]) -> None:
    """Several processes share what was asked for as one member. Each becomes a member with its
    part, and all of them go to one node."""
    processes = ready.pop("processes", 1)
    if processes == 1:
        return
    name = "procs_per_node"
    if ready.get("members_per_node"):
        raise BadField(name, "and per_node say the same in two ways; leave one out")
    gpus = ready.get("gpus", 0)
    if processes == EACH_GPU:
        if gpus < 1 or ready.get("gpu_milli", 1000) != 1000:
            raise BadField(name, "'gpu' means one for each GPU; say how many GPUs, e.g. gpus: 8")
        processes = gpus
    if gpus % processes or ready.get("gpu_milli", 1000) != 1000:
        message = f"{processes} processes cannot share {plural(gpus, 'GPU')} evenly"
        raise BadField(name, f"{message}; use a number that divides them, or gpu for one each")
    ready["gpus"] = gpus // processes
    ready["members_per_node"] = processes
    ready["members"] = ready.get("members", 1) * processes
    ready["members_max"] = ready.get("members_max", 0) * processes
    for target in ("cpu_milli", "memory_mb"):
        if target in ready:
            ready[target] = -(-ready[target] // processes)
    most = max(ready["members"], ready["members_max"])
    if most > MEMBERS_MAX:
        raise BadField(name, f"that makes {most} processes; the maximum is {MEMBERS_MAX}")


def _settle_sweep(ready: dict[str, Any]) -> None:
    names = [name for name in ready if name.startswith(SWEEP)]
    parts = {name.removeprefix(SWEEP): ready.pop(name) for name in names}
    if parts:
        ready["sweep"] = parts


def _settle_places(ready: dict[str, Any]) -> None:
    if ready.get("within_required") and ready.get("within", Within.ANYWHERE) == Within.ANYWHERE:
        raise BadField("strict", "has no effect without within; add e.g. within: rack")
    per_node = ready.get("members_per_node", 0)
    for members in (ready.get("members", 1), ready.get("members_max", 0)):
        if per_node and members % per_node:
            message = f"{per_node} on each node cannot make {members} members"
            raise BadField("per_node", f"{message}; use a number that divides them")


# From the fields of a service, as people write them, to a ServiceSpec.


def to_service(given: Mapping[str, Any]) -> ServiceSpec:
    """A ServiceSpec that the controller accepts, as far as that is known without the cluster."""
    if "name" not in given:
        raise BadField("name", "is missing; name the service, e.g. name: chat")
    of_replica = {name: value for name, value in given.items() if name in ("command", *REPLICA)}
    own = {name: value for name, value in given.items() if name not in of_replica}
    whole: dict[str, Any] = {"scale": {}, "probe": {}, "route": {}, "goals": {}}
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
