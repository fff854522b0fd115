"""Lines of the page's feed for a node, a job and a service: short, because they are frequent. Their
reasons are not rendered yet: one line is made for all readers."""

from __future__ import annotations

from shoal.api.nap_views import sleepers_of, why_no_sleep
from shoal.api.reach import Reach
from shoal.api.views import (
    job_state,
    node_state,
    replica_view,
    service_reason,
    service_state,
    version_before,
)
from shoal.control.loop import ControlLoop
from shoal.core.answers.arrays import counts
from shoal.core.state.state import Node
from shoal.model.array import counts_text
from shoal.model.feed import Held, JobLine, NodeLine, ReplicaLine, ServiceLine
from shoal.model.health import Standing
from shoal.model.job import Job, Phase
from shoal.model.labels import NODE
from shoal.model.node import NodeHealth
from shoal.model.service import Service, ServiceLoad

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
    beats = watch.beats if watch is not None else {}
    beat = max(beats.values(), key=lambda beat: beat.step, default=None)
    paces = sorted(watch.pace.paces_us) if watch is not None else []
    seen = counts(loop.state, job) if job.elements is not None else None
    return JobLine(
        array=job.spec.array,
        elements=seen.elements if seen else 0,
        done=seen.ended if seen else 0,
        counts=counts_text(seen) if seen else "",
        id=job.id,
        state=job_state(job),
        name=job.spec.name or "",
        tenant=job.spec.tenant,
        service=job.spec.service,
        user=job.spec.user,
        members=job.spec.members,
        members_max=job.spec.members_max,
        size=len(job.members) if job.active else 0,
        gpus=job.spec.gpus,
        gpu_milli=job.spec.gpu_milli,
        gpu_memory_mb=job.spec.gpu_memory_mb,
        attempt=job.attempt,
        submitted_ms=job.submitted_ms,
        running_ms=job.running_ms or 0,
        finished_ms=job.finished_ms or 0,
        code=job.code or 0,
        why="" if job.phase is Phase.WAITING else job.why,
        step=beat.step if beat else 0,
        steps=beat.steps_total if beat else 0,
        step_us=paces[len(paces) // 2] if paces else 0,
        moved_ms=max(watch.pace.moved_ms, watch.pace.began_ms) if watch is not None and beat else 0,
        loss=next((b.loss for _, b in sorted(beats.items()) if b.loss is not None), None),
        heat=heat,
        slow=tuple(sorted(watch.slow)) if watch is not None else (),
        nap_ms=(job.dozed_ms or 0) if job.napping else 0,
        wants=job.napping and job.wants,
    )


def service_line(reach: Reach, service: Service) -> ServiceLine:
    loop, name = reach.loop, service.spec.name
    load = loop.state.heard.loads.get(name, ServiceLoad(service=name))
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
        why=load.trouble or service_reason(loop, service),
        replicas=replicas,
    )


def rounded(part: int, whole: int) -> int:
    """A share in per cent, rounded to `HEAT_STEP`; -1 if nothing was reported."""
    if whole <= 0:
        return -1
    return min(100, max(0, round(100 * part / whole / HEAT_STEP) * HEAT_STEP))
