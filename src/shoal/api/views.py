"""Turns the state into what people and scripts see; changes nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from shoal import __version__
from shoal.api.alarms import alarm_lines
from shoal.api.reach import Reach
from shoal.api.sites import site_views
from shoal.control.loop import ControlLoop
from shoal.control.reach import is_loopback
from shoal.core.answers.bound import busiest, judge
from shoal.core.answers.goals import help_texts, missed_text
from shoal.core.answers.preview import closed_text
from shoal.core.answers.why import explain
from shoal.core.books.spending import window
from shoal.core.features.array import counts
from shoal.core.features.fabric.links import weak_links
from shoal.core.features.service.rollout import stalled
from shoal.core.features.service.sites import sites_text
from shoal.core.features.service.sleep import sleeps
from shoal.core.features.supply.orders import supply_lines
from shoal.core.scheduling.hangs import hung_text
from shoal.core.state.apply_array import parts_of
from shoal.core.state.state import Node, State
from shoal.model.array import counts_of
from shoal.model.away import Away
from shoal.model.bound import Bound
from shoal.model.columns import cells_of
from shoal.model.health import Standing
from shoal.model.hidden import service_without_keys, without_keys
from shoal.model.job import Job, Member, MemberRef, Phase
from shoal.model.labels import NODE
from shoal.model.neighbor import PRICE_UNIT
from shoal.model.node import JOINED, NodeHealth, NodeIntent, node_word, unenforced_of
from shoal.model.reason import Shown
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.model.series import NodeSample
from shoal.model.service import GatewayEntry, Service, ServiceLoad
from shoal.model.views import (
    AwayView,
    CheckView,
    JobRow,
    JobView,
    MemberView,
    NapView,
    NodeView,
    ProgressView,
    Remedy,
    ReplicaView,
    ServiceView,
    StatusView,
)

COMMAND_CHARACTERS_MAX = 200
STANDING_HIDDEN = Shown("admins can see why")
DRAINED = "drained"  # nothing runs there any more: it can be removed


def job_row(reach: Reach, job: Job) -> JobRow:
    return JobRow(**row_fields(job), **_now(reach, job))


def ended_row(job: Job) -> JobRow:
    """A finished job no longer changes, so any thread may call this at any moment. Its reason is
    left to the reader's own thread."""
    array = counts_of(*parts_of(job), 0, 0) if job.elements is not None else None
    return JobRow(**row_fields(job), why=job.why, progress=None, array=array)


def job_view(reach: Reach, job: Job, *, explained: bool = True) -> JobView:
    """Unless it is `explained`, a waiting job has no reason: it takes a while to find."""
    gang = [
        MemberView(
            member=number,
            node=member.slice.node,
            gpus=list(member.held.gpus),
            status="asleep" if member.asleep and not member.over else member.status.value,
            code=member.code,
        )
        for number, member in enumerate(job.members)
    ]
    return JobView(
        **row_fields(job),
        **_now(reach, job, explained),
        spec=without_keys(job.spec),
        gang=gang,
        placed_ms=job.placed_ms,
        not_before_ms=job.not_before_ms,
        failures=job.failures,
        losses=job.losses,
        hangs=job.hangs,
        master=job.master,
        notes=list(job.notes),
        naps=job.naps,
        slept_ms=job.slept_ms,
        startup=job.startup,
        until_ms=job.until_ms or msgspec.UNSET,
    )


def seen_remedies(reach: Reach, remedies: list[Remedy]) -> list[Remedy]:
    return [
        msgspec.structs.replace(one, text=reach.text(one.text), cost=reach.text(one.cost))
        for one in remedies
    ]


def _now(reach: Reach, job: Job, explained: bool = True) -> dict[str, Any]:
    """What also depends on the rest of the cluster."""
    loop = reach.loop
    why = explain(loop.state, job, loop.policy, loop.clock.now_ms()) if explained else job.why
    array = counts(loop.state, job) if job.elements is not None else None
    use = gpu_use(loop, job) if job.spec.gpus and job.phase is Phase.RUNNING else {}
    return {"why": reach.text(why), "progress": progress_view(loop, job), "array": array, **use}


def base_fields(job: Job) -> dict[str, Any]:
    """What a list and the feed both say of it, but for its reason."""
    spec = job.spec
    return {
        "id": job.id,
        "state": job.state,
        "name": spec.name or "",
        "tenant": spec.tenant,
        "user": spec.user,
        "service": spec.service,
        "members": spec.members,
        "members_max": spec.members_max,
        "size": len(job.members) if job.active else 0,
        "gpus": spec.gpus,
        "gpu_milli": spec.gpu_milli,
        "gpu_memory_mb": spec.gpu_memory_mb,
        "attempt": job.attempt,
        "submitted_ms": job.submitted_ms,
        "running_ms": job.began_ms,
        "finished_ms": job.finished_ms,
        "code": job.code,
    }


def row_fields(job: Job) -> dict[str, Any]:
    command = shlex.join(job.spec.command)
    if len(command) > COMMAND_CHARACTERS_MAX:
        command = command[: COMMAND_CHARACTERS_MAX - 3] + "..."
    nodes = dict.fromkeys(member.slice.node for member in job.members)
    return {
        **base_fields(job),
        "priority": job.spec.priority,
        "nodes": [] if job.phase is Phase.WAITING else list(nodes),
        "command": command,
        "labels": job.spec.labels,
        "nap": nap_view(job),
        "away": away_view(job.away) if job.away is not None else msgspec.UNSET,
        "cells": cells_of(job),
        "idle_since_ms": job.idle_since_ms if job.phase is Phase.RUNNING else None,
    }


def away_view(away: Away) -> AwayView:
    price = away.price / PRICE_UNIT if away.price is not None else None
    return AwayView(
        neighbor=away.neighbor,
        id=away.id,
        since_ms=away.since_ms,
        running_ms=away.running_ms,
        price=price,
    )


def node_view(reach: Reach, node: Node) -> NodeView:
    """What led to a node's standing may quote anybody's jobs: only those who see all get it."""
    loop = reach.loop
    room = loop.state.rooms[node.index]
    placed = loop.state.placed[node.id].items()
    jobs = dict.fromkeys(ref.job for ref, job in placed if reach.sees(job))
    lost = node.health is NodeHealth.LOST
    return NodeView(
        id=node.id,
        state=node_state(loop, node),
        health=node.health.value,
        intent=node.intent.value,
        why=node_why(reach, node),
        since_ms=node.since_ms,
        standing=node.record.standing.value,
        history=list(node.record.rendered(reach.text).history) if reach.who.sees_all else [],
        place=node.spec.place,
        measured_place=loop.state.fabric.places.get(node.id, ""),
        weak_links=weak_links(loop.state.fabric, node.id),
        address=node.spec.address,
        origin=node.spec.origin,
        order=node.spec.order,
        checkpoints=node.spec.checkpoints,
        containers=node.spec.containers,
        unenforced=unenforced_of(node.spec, tenants=bool(loop.state.identity.tenants)),
        labels={key: value for key, value in node.labels.items() if key != NODE},
        taints=list(node.taints),
        version=loop.state.heard.versions.get(node.id, ""),
        incarnation=node.incarnation,
        gpu_model=node.spec.gpu_model,
        gpu_memory_mb=node.spec.gpu_memory_mb,
        gpus=node.spec.gpus,
        gpus_free=0 if lost else room.gpus,
        gpu_milli_free=0 if lost else sum(max(0, left) for left in room.gpu_milli),
        cpu_milli=node.spec.cpu_milli,
        cpu_milli_free=0 if lost else room.cpu_milli,
        memory_mb=node.spec.memory_mb,
        memory_mb_free=0 if lost else room.memory_mb,
        jobs=list(jobs),
        closed=closed_text(node, loop.clock.now_ms()),
        ends_ms=node.ends_ms,
        ends_in_ms=None if node.ends_ms is None else node.ends_ms - loop.clock.now_ms(),
        ends_why=node.ends_why,
        hangs=hung_text(loop.state, node.id, loop.clock.now_ms()),
        **node_naps(loop, node),
    )


def node_why(reach: Reach, node: Node) -> Shown:
    if (aside := reach.loop.tick.doubts.aside.get(node.id)) is not None:
        return Shown(aside.why) if reach.who.sees_all else STANDING_HIDDEN
    if node.health is not NodeHealth.READY or node.record.standing is Standing.OK:
        return reach.text(node.why)
    return reach.text(node.record.why) if reach.who.sees_all else STANDING_HIDDEN


def check_view(loop: ControlLoop, node: str, check: str) -> CheckView | None:
    """None if there was no such check, or it was too long ago."""
    known = loop.state.heard.verdicts.get(node)
    if known is not None and known[0] == check:
        _, result, verdict = known
        return CheckView(
            node=node,
            id=check,
            busy=result.busy,
            took_ms=result.took_ms,
            verdict=verdict,
            notes=result.notes,
        )
    if loop.state.heard.asked.get(node) == check:
        return CheckView(node=node, id=check)
    return None


def service_view(reach: Reach, service: Service, entry: GatewayEntry) -> ServiceView:
    state, name = reach.loop.state, service.spec.name
    load = service_load(state, name)
    replicas = [
        replica_view(reach, service, load, state.jobs[job_id])
        for job_id in state.replicas.get(name, {})
    ]
    scale = service.spec.scale
    return ServiceView(
        name=name,
        state=service_state(service, load, replicas),
        url=_url(service, entry),
        browser_url=_browser_url(service, entry),
        version=service.version,
        least=scale.least,
        most=scale.most,
        wanted=service.wanted,
        ready=sum(replica.state == "ready" for replica in replicas),
        in_flight=load.in_flight,
        queued=load.queued + load.held,
        requests_per_s=load.answers_per_ks / 1000,
        failed_per_s=load.failures_per_ks / 1000,
        response_ms=load.response_ms,
        why=reach.text(service_reason(reach.loop, service, load)),
        replicas=replicas,
        spec=service_without_keys(service.spec),
        before=version_before(service),
        tokens=load.tokens,
        help=_help(reach, service, load),
        sites=site_views(reach, service),
    )


def _help(reach: Reach, service: Service, load: ServiceLoad) -> list[str]:
    """What would help a service that misses its goals."""
    if not missed_text(service, load):
        return []
    state, policy, now_ms = reach.loop.state, reach.loop.policy, reach.loop.clock.now_ms()

    def waits(job: Job) -> str:
        return explain(state, job, policy, now_ms)

    return [reach.text(one) for one in help_texts(state, service, load, waits, reach.holders)]


def version_before(service: Service) -> int:
    """The version that a roll-back goes to; 0: there is none."""
    return next((one.version for one in service.earlier), 0)


def service_load(state: State, name: str) -> ServiceLoad:
    """What was last heard of it from the gateway."""
    return state.heard.loads.get(name) or ServiceLoad(service=name, seen=False)


def service_reason(loop: ControlLoop, service: Service, load: ServiceLoad) -> str:
    state, now_ms = loop.state, loop.clock.now_ms()
    if load.trouble or not (load.seen or service.stopping):
        return load.trouble or "the gateway has not reported yet that it serves it"

    def waits(job: Job) -> str:
        return explain(state, job, loop.policy, now_ms)

    found = stalled(state, service, now_ms, waits) or sleeps(state, service, waits)
    found = found or sites_text(state, service) or service.why
    return "; ".join(filter(None, (missed_text(service, load), found)))


def service_state(service: Service, load: ServiceLoad, replicas: list[ReplicaView]) -> str:
    if service.stopping:
        return "stopping"
    if load.trouble:
        return "failing"
    if not load.seen:
        return "starting"  # a request may be refused, however many replicas answer
    ready = [replica for replica in replicas if replica.state == "ready"]
    new = [replica for replica in ready if replica.version == service.version]
    napping = [one.state for one in replicas if one.version == service.version]
    if not ready and "waking" in napping:
        return "waking"
    if not ready and any(word in ("asleep", "dozing") for word in napping):
        return "asleep"
    if len(new) >= service.wanted and len(new) == len(ready):
        return "ready" if service.wanted else "idle"
    if service.failures:
        return "failing"
    if len(ready) > len(new):
        return "rolling"
    # A service with its minimum of replicas is ready, even if more are wanted.
    return "ready" if len(new) >= max(1, service.spec.scale.least) else "starting"


def replica_view(reach: Reach, service: Service, load: ServiceLoad, job: Job) -> ReplicaView:
    loop = reach.loop
    seen = load.replicas.get(job.id)
    word = job.phase.value
    if job.id in service.draining:
        word = "draining"
    elif job.id in service.ready:
        word = "starting" if seen is None else "ready" if seen.up else "down"
    elif job.phase is Phase.RUNNING:
        word = "starting"
    return ReplicaView(
        job=job.id,
        node=job.members[0].slice.node if job.active else "",
        nodes=[member.slice.node for member in job.members] if job.active else [],
        members=job.spec.members,
        address=job.serves_at if job.active else "",
        version=job.spec.version,
        state=word,
        in_flight=seen.in_flight if seen else 0,
        requests_per_s=seen.answers_per_ks / 1000 if seen else 0.0,
        response_ms=seen.response_ms if seen else 0,
        why=reach.text(explain(loop.state, job, loop.policy, loop.clock.now_ms())),
        engine=load.engines.get(job.id),
    )


def _url(service: Service, entry: GatewayEntry) -> str:
    """Where any program finds it, without DNS."""
    route, host = service.spec.way, _shown(entry)
    if route.port:
        return f"http{'s' if route.certificate else ''}://{host}:{route.port}/"
    return f"{_scheme(entry)}://{host}:{entry.port}{route.prefix}/"


def _browser_url(service: Service, entry: GatewayEntry) -> str:
    """Where a page with absolute links works, as those of Gradio and FastAPI's /docs: at a host
    name or a port, where nothing is stripped from the path. Browsers know that *.localhost is this
    machine; other domains are the operator's promise."""
    route = service.spec.way
    if route.port or route.root_path_env:
        return _url(service, entry)
    name = route.host or f"{route.service}.{entry.domain}"
    elsewhere = entry.domain == "localhost" and not is_loopback(_shown(entry).strip("[]"))
    if elsewhere and not route.host:
        return ""
    return f"{_scheme(entry)}://{name}:{entry.port}/"


def _scheme(entry: GatewayEntry) -> str:
    return "https" if entry.certificate else "http"


def _shown(entry: GatewayEntry) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(entry.address, entry.address)
    return f"[{host}]" if ":" in host else host


def node_state(loop: ControlLoop, node: Node) -> str:
    word = node_word(node.health, node.record.standing, node.intent)
    return DRAINED if word == NodeIntent.DRAINING and not loop.state.placed[node.id] else word


LOCAL = "local"


def known_nodes(loop: ControlLoop) -> list[Node]:
    return [node for node in loop.state.order if node.intent is not NodeIntent.REMOVED]


def gpu_counts(loop: ControlLoop) -> dict[str, int]:
    """Every GPU is held, free or unusable because of its node; the three add up to the total."""
    held = free = unusable = 0
    for node in known_nodes(loop):
        lost = node.health is NodeHealth.LOST
        idle = 0 if lost else loop.state.rooms[node.index].gpus
        held += 0 if lost else node.spec.gpus - idle
        free += idle if node.schedulable else 0
        unusable += node.spec.gpus if lost else 0 if node.schedulable else idle
    return {"held": held, "free": free, "unusable": unusable}


def _engine(loop: ControlLoop) -> str:
    """Machines may join a cluster whose engine brings none."""
    joined = any(node.spec.origin for node in known_nodes(loop))
    return JOINED if joined and loop.engine_kind == LOCAL else loop.engine_kind


def status_view(reach: Reach) -> StatusView:
    """Machines are everybody's; jobs are counted if the sender may see them."""
    loop = reach.loop
    state = loop.state
    nodes: dict[str, int] = {}
    gpus = cpu_milli = cpu_milli_held = 0
    for node in known_nodes(loop):
        word = node_state(loop, node)
        nodes[word] = nodes.get(word, 0) + 1
        if node.health is not NodeHealth.LOST:
            room = state.rooms[node.index]
            gpus += node.spec.gpus
            cpu_milli += node.spec.cpu_milli
            cpu_milli_held += node.spec.cpu_milli - room.cpu_milli
    counts = gpu_counts(loop)
    jobs: dict[str, int] = {}
    for job in reach.jobs():
        jobs[job.phase.value] = jobs.get(job.phase.value, 0) + 1
    return StatusView(
        engine=_engine(loop),
        version=__version__,
        epoch=state.epoch,
        restarts=loop.restarts,
        now_ms=loop.clock.now_ms(),
        up_since_ms=loop.started_ms,
        nodes=nodes,
        gpus=gpus,
        gpus_held=counts["held"],
        gpus_free=counts["free"],
        gpus_unusable=counts["unusable"],
        cpu_milli=cpu_milli,
        cpu_milli_held=cpu_milli_held,
        jobs=jobs,
        submitted=state.submitted if reach.who.sees_all else None,
        finished=state.finished if reach.who.sees_all else None,
        last_seq=loop.last_seq,
        waits=reach.waits(),
        alarms=alarm_lines(loop) if reach.who.sees_all else (),
        supply=supply_lines(state, loop.clock.now_ms()) if reach.who.sees_all else [],
        neighbors=len(reach.guests().union(loop.neighboring.sites if loop.neighboring else ()))
        or msgspec.UNSET,
    )


# What people see of jobs that sleep, and of nodes where they do.


class Sleepers(NamedTuple):
    """Members that sleep on a node, or are on the way there or back."""

    members: int
    host_mb: int  # that is set aside for what they had on GPUs


def nap_view(job: Job) -> NapView | None:
    if not job.napping or job.dozed_ms is None:
        return None
    return NapView(
        since_ms=job.dozed_ms,
        cause=job.sleep_cause.value if job.sleep_cause is not None else "",
        wants=job.wants,
        host_mb=sum(member.host_mb for member in job.members if not member.over),
    )


def sleepers_of(loop: ControlLoop, node: Node) -> Sleepers:
    found = list(_asleep(loop, node))
    return Sleepers(len(found), sum(member.host_mb for member in found))


def _asleep(loop: ControlLoop, node: Node) -> Iterable[Member]:
    if not loop.state.napping:  # nearly always true, and much cheaper
        return
    for ref, job in loop.state.placed[node.id].items():
        if job.napping:
            yield job.members[ref.member]


def why_no_sleep(node: Node) -> str:
    return "" if node.spec.sleep else node.spec.sleep_why or "its agent is older"


def node_naps(loop: ControlLoop, node: Node) -> dict[str, Any]:
    sleepers = sleepers_of(loop, node)
    return {
        "sleep": node.spec.sleep,
        "sleep_why": why_no_sleep(node),
        "sleepers": sleepers.members,
        "sleepers_mb": sleepers.host_mb,
    }


def naps_mark(jobs: Iterable[Job]) -> tuple[tuple[str, int], ...]:
    """Changes whenever one of these lends GPUs, or takes some again."""
    return tuple((job.phase.value, job.naps) for job in jobs if job.naps)


# How far a job is and what limits it, as its members report.


Samples = Mapping[str, NodeSample]  # the newest of each node


def progress_view(
    loop: ControlLoop, job: Job, samples: Samples | None = None
) -> ProgressView | None:
    """The furthest member's progress, if the job's members report steps."""
    watch = loop.state.heard.watches.get(job.id)
    if watch is None or not watch.beats:
        return None
    beat = max(watch.beats.values(), key=lambda beat: beat.step)
    paces = sorted(watch.pace.paces_us)
    step_us = paces[len(paces) // 2] if paces else 0
    left = beat.steps_total - beat.step if beat.steps_total else 0
    return ProgressView(
        step=beat.step,
        steps_total=beat.steps_total,
        step_us=step_us,
        left_ms=max(0, left) * step_us // 1000 if step_us and beat.steps_total else None,
        saved_step=job.saved_step,
        loss=next((b.loss for _, b in sorted(watch.beats.items()) if b.loss is not None), None),
        metrics=dict(beat.metrics),
        slow=sorted(watch.slow),
        bound=bound_of(loop, job, samples or {}),
    )


def bound_of(loop: ControlLoop, job: Job, samples: Samples) -> Bound | None:
    """What limits the steps of a job that runs now. None: it does not report enough of them."""
    watch = loop.state.heard.watches.get(job.id)
    if watch is None or watch.attempt != job.attempt or job.phase is not Phase.RUNNING:
        return None
    nodes = [member.slice.node for member in job.members]
    busy_milli, fabric = busiest(_busy(job, samples)), loop.state.fabric
    return judge(window(watch.recent), nodes, busy_milli=busy_milli, fabric=fabric)


def gpu_use(loop: ControlLoop, job: Job) -> dict[str, Any]:
    """How busy its GPUs are now, and what it has on them, as far as their drivers tell. Of a GPU
    that it shares, only its node knows what is its own."""
    busy = [milli for milli in _busy(job, loop.newest) if milli is not None]
    used: list[int] = []
    for number, member in enumerate(job.members):
        node, sample = loop.state.nodes.get(member.slice.node), loop.newest.get(member.slice.node)
        if node is None or sample is None:
            continue
        if member.slice.gpu_milli != WHOLE_GPU_MILLI:
            heard = loop.state.heard.uses.get(node.id, {})
            used += filter(None, [heard.get(MemberRef(job.id, job.attempt, number))])
            continue
        there = [sample.gpus[gpu] for gpu in member.slice.gpus if gpu < len(sample.gpus)]
        parts = [gpu.memory_milli for gpu in there if gpu.memory_milli is not None]
        used += [part * node.spec.gpu_memory_mb // 1000 for part in parts]
    return {
        "gpu_busy_milli": sum(busy) // len(busy) if busy else None,
        "gpu_used_mb": sum(used) if used else None,
    }


def _busy(job: Job, samples: Samples) -> Iterator[int | None]:
    for member in job.members:
        sample = samples.get(member.slice.node)
        for gpu in member.slice.gpus if sample is not None else ():
            if sample is not None and gpu < len(sample.gpus):
                yield sample.gpus[gpu].busy_milli
