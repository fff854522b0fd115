"""Lines of the page's feed for a node, a job and a service: short, because they are frequent. Their
reasons are not rendered yet: one line is made for all readers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from shoal.api.principal import acting
from shoal.api.reach import Reach
from shoal.api.sites import site_views
from shoal.api.views import (
    STANDING_HIDDEN,
    base_fields,
    node_state,
    replica_view,
    service_load,
    service_reason,
    service_state,
    sleepers_of,
    status_view,
    version_before,
    why_no_sleep,
)
from shoal.control.loop import ControlLoop
from shoal.core.features.array import counts
from shoal.core.state.heard import Watch
from shoal.core.state.state import Node
from shoal.model.array import counts_text
from shoal.model.feed import Change, Held, JobLine, NodeLine, ReplicaLine, ServiceLine, Snapshot
from shoal.model.health import Standing
from shoal.model.identity import Role
from shoal.model.job import Job, Phase
from shoal.model.labels import NODE
from shoal.model.node import NodeHealth
from shoal.model.policy import Others
from shoal.model.reason import OPERATOR, Reader, render
from shoal.model.service import Service

HEAT_STEP = 5  # per cent: smaller changes are noise and would be sent constantly
LABELS_CHARACTERS_MAX = 160  # of a node


def node_line(loop: ControlLoop, node: Node) -> NodeLine:
    ailing = node.health is NodeHealth.READY and node.record.standing is not Standing.OK
    held, asleep = [], dict[str, None]()
    for ref, job in loop.state.placed[node.id].items():
        member = job.members[ref.member]
        slice_ = member.slice
        if member.lent:
            asleep[job.id] = None
        elif slice_.gpus:
            held.append(Held(job.id, ref.member, slice_.gpus, slice_.gpu_milli))
    return NodeLine(
        id=node.id,
        state=node_state(loop, node),
        place=node.spec.place,
        gpus=node.spec.gpus,
        model=node.spec.gpu_model,
        held=tuple(held),
        why=node.record.why if ailing else node.why,
        since_ms=node.since_ms,
        standing=node.record.standing.value if ailing else "",
        ends_ms=node.ends_ms or 0,
        ends_why=node.ends_why,
        asleep=tuple(asleep),
        sleepers_mb=sleepers_of(loop, node).host_mb,
        no_sleep=why_no_sleep(node) if node.spec.gpus else "",
        labels=_labels_text(node) if node.spec.labels or node.labels_set or node.taints else "",
    )


def _labels_text(node: Node) -> str:
    pairs = [f"{key}={value}" for key, value in sorted(node.labels.items()) if key != NODE]
    return " ".join([*(f"!{taint}" for taint in node.taints), *pairs])[:LABELS_CHARACTERS_MAX]


def job_line(loop: ControlLoop, job: Job, heat: tuple[int, ...] = ()) -> JobLine:
    watch = loop.state.heard.watches.get(job.id)
    seen = counts(loop.state, job) if job.elements is not None else None
    return JobLine(
        **base_fields(job),
        **(_steps(watch) if watch is not None else {}),
        array=job.spec.array,
        elements=seen.elements if seen else 0,
        done=seen.ended if seen else 0,
        counts=counts_text(seen) if seen else "",
        why="" if job.phase is Phase.WAITING else job.why,
        heat=heat,
        nap_ms=(job.dozed_ms or 0) if job.napping else 0,
        wants=job.napping and job.wants,
        cluster=job.away.neighbor if job.away is not None else "",
    )


def _steps(watch: Watch) -> dict[str, Any]:
    """What its members report of their work."""
    beats, paces = watch.beats, sorted(watch.pace.paces_us)
    beat = max(beats.values(), key=lambda beat: beat.step, default=None)
    return {
        "step": beat.step if beat else 0,
        "steps": beat.steps_total if beat else 0,
        "step_us": paces[len(paces) // 2] if paces else 0,
        "moved_ms": max(watch.pace.moved_ms, watch.pace.began_ms) if beat else 0,
        "loss": next((b.loss for _, b in sorted(beats.items()) if b.loss is not None), None),
        "slow": tuple(sorted(watch.slow)),
    }


def service_line(reach: Reach, service: Service) -> ServiceLine:
    loop, name = reach.loop, service.spec.name
    load = service_load(loop.state, name)
    views = [
        replica_view(reach, service, load, loop.state.jobs[job_id])
        for job_id in loop.state.replicas.get(name, {})
    ]
    replicas = tuple(
        ReplicaLine(
            job=view.job,
            state=view.state,
            node=view.node,
            nodes=tuple(view.nodes) if view.members > 1 else (),
            version=view.version,
            in_flight=view.in_flight,
            rps=view.requests_per_s,
            response_ms=view.response_ms,
        )
        for view in views
    )
    return ServiceLine(
        name=name,
        state=service_state(service, load, views),
        tenant=service.spec.replica.tenant,
        version=service.version,
        before=version_before(service),
        least=service.spec.scale.least,
        most=service.spec.scale.most,
        target=service.spec.scale.target,
        wanted=service.wanted,
        ready=sum(view.state == "ready" for view in views),
        in_flight=load.in_flight,
        queued=load.queued + load.held,
        rps=load.answers_per_ks / 1000,
        failed_per_s=load.failures_per_ks / 1000,
        response_ms=load.response_ms,
        why=service_reason(loop, service, load),
        replicas=replicas,
        sites=tuple(site_views(reach, service, why=False)),
    )


def rounded(part: int, whole: int) -> int:
    """A share in per cent, rounded to `HEAT_STEP`; -1 if nothing was reported."""
    if whole <= 0:
        return -1
    return min(100, max(0, round(100 * part / whole / HEAT_STEP) * HEAT_STEP))


# The page's feed as one tenant may see it: cut out of what was found once for all pages.


class Gone(msgspec.Struct):
    """Tenants of jobs and services that no longer exist: their lines are gone, too."""

    jobs: dict[str, str] = {}
    services: dict[str, str] = {}


Line = TypeVar("Line", NodeLine, JobLine, ServiceLine)
Whole = TypeVar("Whole", Snapshot, Change)


def for_all(whole: Whole) -> Whole:
    """For those who see all."""
    return msgspec.structs.replace(
        whole,
        nodes=[readable(line, OPERATOR) for line in whole.nodes],
        jobs=[readable(line, OPERATOR) for line in whole.jobs],
        services=[readable(line, OPERATOR) for line in whole.services],
        ended=[readable(line, OPERATOR) for line in whole.ended],
    )


def readable(line: Line, reader: Reader) -> Line:
    why = render(line.why, reader)
    return line if why == line.why else msgspec.structs.replace(line, why=why)


class Own:
    """Made for one change: it reads the state as it is then."""

    def __init__(self, loop: ControlLoop, tenant: str) -> None:
        self.tenant = tenant
        self._reach = Reach(loop, acting(loop.state.identity, "", tenant, Role.VIEWER))

    def snapshot(self, whole: Snapshot) -> Snapshot:
        return Snapshot(
            status=status_view(self._reach),
            nodes=self._nodes(whole.nodes),
            jobs=self._jobs(whole.jobs),
            services=self._services(whole.services),
            ended=self._jobs(whole.ended),
            busy=whole.busy,
        )

    def change(self, whole: Change, gone: Gone) -> Change:
        return Change(
            status=status_view(self._reach),
            nodes=self._nodes(whole.nodes),
            jobs=self._jobs(whole.jobs),
            services=self._services(whole.services),
            ended=self._jobs(whole.ended),
            gone_nodes=whole.gone_nodes,
            gone_jobs=[job for job in whole.gone_jobs if gone.jobs.get(job) == self.tenant],
            gone_services=[
                name for name in whole.gone_services if gone.services.get(name) == self.tenant
            ],
            busy=whole.busy,
        )

    def _jobs(self, lines: Iterable[JobLine]) -> list[JobLine]:
        own = (line for line in lines if line.tenant == self.tenant)
        return [readable(line, self._reach.reader) for line in own]

    def _services(self, lines: Iterable[ServiceLine]) -> list[ServiceLine]:
        own = (line for line in lines if line.tenant == self.tenant)
        return [readable(line, self._reach.reader) for line in own]

    def _nodes(self, lines: Iterable[NodeLine]) -> list[NodeLine]:
        return [
            msgspec.structs.replace(
                line,
                held=tuple(map(self._held, line.held)),
                why=STANDING_HIDDEN if line.standing else self._reach.text(line.why),
                asleep=tuple(job for job in line.asleep if self._own(job)),
            )
            for line in lines
        ]

    def _own(self, job_id: str) -> bool:
        job = self._reach.loop.state.jobs.get(job_id)
        return job is not None and job.spec.tenant == self.tenant

    def _held(self, held: Held) -> Held:
        """The GPUs of others are taken; their job has no id here, at most its tenant as @TENANT."""
        loop = self._reach.loop
        job = loop.state.jobs.get(held.job)
        if job is not None and job.spec.tenant == self.tenant:
            return held
        named = job is not None and loop.policy.others is Others.TENANTS
        name = f"@{job.spec.tenant}" if named and job is not None else ""
        return Held(name, 0, held.gpus, held.milli)
