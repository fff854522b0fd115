"""What an action on nodes, jobs or a service would do, before it is done."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shoal.api.handling import handles
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.api.views import service_load, version_before
from shoal.calls.cluster import ClusterCalls
from shoal.core.answers.preview import (
    Effect,
    cancel_lines,
    cancelled,
    cordon_lines,
    dependents_of,
    drain_lines,
    drained,
    requeue_lines,
    requeued,
    saves,
    uncordon_lines,
)
from shoal.core.state.state import Node
from shoal.model.durations import duration_text
from shoal.model.hidden import service_without_keys
from shoal.model.node import NodeIntent
from shoal.model.preview import NAMES_MAX, Action, Change, JobEffect, PreviewView, VersionView
from shoal.model.resources import plural
from shoal.model.service import Service, ServiceSpec

JOBS_SHOWN_MAX = 200
CHANGED_CHARACTERS_MAX = 300
ON_NODES = (Action.DRAIN, Action.CORDON, Action.UNCORDON)
ON_JOBS = (Action.CANCEL, Action.REQUEUE)
Replicas = Annotated[int, Meta(ge=0, le=10_000)]


class Previews:
    @handles(ClusterCalls.preview)
    def preview(
        self,
        reach: Reach,
        action: Action,
        names: Annotated[list[str], Meta(min_length=1, max_length=NAMES_MAX)],
        version: Annotated[int, Meta(ge=0, le=1 << 53)] = 0,
        least: Replicas = 0,
        most: Replicas = 0,
    ) -> PreviewView:
        names = list(dict.fromkeys(names))
        if action in ON_NODES:
            return _of_nodes(reach, action, names)
        if action in ON_JOBS:
            return _of_jobs(reach, action, names)
        if len(names) > 1:
            raise Refusal(422, "is about one service at a time", "names")
        service = reach.service(names[0])
        if action is Action.STOP:
            return _stopped(reach, service)
        spec = service.spec
        if action is Action.ROLL_BACK:
            spec = rolled_back(service, version)
        else:
            scale = msgspec.structs.replace(spec.scale, least=least, most=max(1, least, most))
            spec = msgspec.structs.replace(spec, scale=scale)
        return _changed(reach, action, service, spec, version or version_before(service))


def _of_nodes(reach: Reach, action: Action, names: list[str]) -> PreviewView:
    state, now_ms = reach.loop.state, reach.loop.clock.now_ms()
    nodes = [_node(reach, name) for name in names]
    if action is Action.DRAIN:
        effects = drained(state, nodes, now_ms)
        return _view(reach, action, names, drain_lines(nodes, effects), effects)
    if action is Action.CORDON:
        return _view(reach, action, names, cordon_lines(state, nodes), [])
    return _view(reach, action, names, uncordon_lines(nodes, now_ms), [])


def _node(reach: Reach, name: str) -> Node:
    node = reach.loop.state.nodes.get(name)
    if node is None or node.intent is NodeIntent.REMOVED:
        raise Refusal(404, f"there is no node {name[:64]!r}; see: shoal nodes", "node")
    return node


def _of_jobs(reach: Reach, action: Action, names: list[str]) -> PreviewView:
    state, now_ms = reach.loop.state, reach.loop.clock.now_ms()
    jobs = [reach.job(name) for name in names]
    if action is Action.REQUEUE:
        effects = requeued(state, jobs, now_ms)
        return _view(reach, action, names, requeue_lines(effects), effects)
    effects = cancelled(state, jobs, now_ms)
    view = _view(reach, action, names, cancel_lines(state, effects), effects)
    lost, freed = dependents_of(state, effects)
    view.dependents = [job.id for job in (*lost, *freed) if reach.sees(job)]
    return view


def _view(
    reach: Reach, action: Action, names: list[str], lines: list[str], effects: Sequence[Effect]
) -> PreviewView:
    jobs = [effect for effect in effects if effect.job.elements is None]
    seen = [effect for effect in jobs if reach.sees(effect.job)]
    seen.sort(key=lambda effect: effect.gpu_ms, reverse=True)
    return PreviewView(
        action=action,
        names=names,
        lines=[reach.text(line) for line in lines],
        jobs=[_effect(effect) for effect in seen[:JOBS_SHOWN_MAX]],
        others=len(jobs) - len(seen),
        gpu_ms=sum(effect.gpu_ms for effect in jobs),
    )


def _effect(effect: Effect) -> JobEffect:
    job = effect.job
    return JobEffect(
        id=job.id,
        name=job.spec.name or "",
        state=job.state,
        deed=effect.deed,
        unsaved_ms=effect.unsaved_ms,
        gpu_ms=effect.gpu_ms,
        saves=saves(job),
        to=list(effect.to),
    )


# -- services --------------------------------------------------------------------------------------


def _stopped(reach: Reach, service: Service) -> PreviewView:
    state, name = reach.loop.state, service.spec.name
    replicas = len(state.replicas.get(name, {}))
    load = service_load(state, name)
    lines = [f"{plural(replicas, 'replica')} of {name} {'ends' if replicas == 1 else 'end'}"]
    if service.sites:
        lines.append(f"it ends at {', '.join(service.sites)}, too, as soon as they can be reached")
    if load.work:
        finished = f"{plural(load.work, 'open request')} {'is' if load.work == 1 else 'are'}"
        lines.append(f"{finished} finished first, within {duration_text(service.spec.drain_ms)}")
    if load.answers_per_ks:
        rate = f"{load.answers_per_ks / 1000:.1f} requests/s"
        lines.append(f"it answers {rate} now; later requests are refused")
    return PreviewView(action=Action.STOP, names=[name], lines=lines)


def rolled_back(service: Service, version: int) -> ServiceSpec:
    """As it was in that version, 0: the newest other one; with as many replicas as now,
    where it is now."""
    name, known = service.spec.name, service.earlier
    if not known:
        raise Refusal(409, f"{name} has no other version that was ever ready", "service")
    past = next((one for one in known if version in (0, one.version)), None)
    if past is None:
        there = ", ".join(str(one.version) for one in known)
        raise Refusal(
            409, f"{name} cannot go back to version {version}, only to {there}", "version"
        )
    now = service.spec
    return msgspec.structs.replace(past.spec, scale=now.scale, clusters=now.clusters)


def _changed(
    reach: Reach, action: Action, service: Service, spec: ServiceSpec, version: int
) -> PreviewView:
    changes = list(differences(service.spec, spec))
    name, count = service.spec.name, len(reach.loop.state.replicas.get(service.spec.name, {}))
    if action is Action.ROLL_BACK:
        lines = [f"{name} rolls back to version {version}"]
        versions = [
            VersionView(version=one.version, at_ms=one.at_ms, why=reach.text(one.why))
            for one in service.earlier
        ]
    else:
        versions = []
        lines = [f"{name} runs {spec.scale.least} to {spec.scale.most} replicas, {count} now"]
    if not changes:
        lines = ["nothing changes"]
    if spec.replica != service.spec.replica:
        replaced = f"{plural(count, 'replica')} {'is' if count == 1 else 'are'} replaced"
        lines.append(f"{replaced}{' one by one' * (count > 1)}, without a failed request")
    lines += [
        f"{one.field}: {one.before or '(none)'} -> {one.after or '(none)'}" for one in changes
    ]
    return PreviewView(action=action, names=[name], lines=lines, changes=changes, versions=versions)


def differences(before: ServiceSpec, after: ServiceSpec) -> Iterator[Change]:
    """The fields that differ, as somebody who may see the service reads them."""
    old, new = (_flat(msgspec.to_builtins(service_without_keys(one))) for one in (before, after))
    for field in dict.fromkeys((*old, *new)):
        if old.get(field) != new.get(field):
            yield Change(field=field, before=_text(old.get(field)), after=_text(new.get(field)))


def _flat(fields: dict[str, Any], start: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{start}{name}." if name != "replica" else start)
        else:
            found[f"{start}{name}"] = shlex.join(value) if name == "command" else value
    return found


def _text(value: Any) -> str:
    if value is None or value in ("", [], ()):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return (
        text if len(text) <= CHANGED_CHARACTERS_MAX else text[: CHANGED_CHARACTERS_MAX - 3] + "..."
    )
