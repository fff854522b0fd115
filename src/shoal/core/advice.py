"""What would let a waiting job start now: its request changed a little, tried on the true state."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.core.queue import gang_of_spec
from shoal.core.scheduling.fit import fit, shortage
from shoal.core.state import State
from shoal.model.job import Job, JobSpec, Phase, Within
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.resources import plural

ADVICE_MAX = 3


def advise(state: State, job: Job, now_ms: int) -> list[str]:
    """Sentences, the smallest change first; none if nothing small would help."""
    if job.phase is not Phase.WAITING or job.id in state.claims or job.not_before_ms > now_ms:
        return []
    if not shortage(state, gang_of_spec(job.spec)):
        if job.spec.time_limit_ms or job.spec.estimate_ms:
            return []
        return ["a time limit: it could fill a gap if it were known to end soon enough"]
    found = [text for text, spec in _changes(job.spec) if fit(state, gang_of_spec(spec))]
    return [*found[:ADVICE_MAX], *_closed(state, job)]


def _changes(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    replace = msgspec.structs.replace
    if spec.within_required and spec.within is not Within.ANYWHERE:
        near = f"without --strict it need not stay in one {spec.within.value}, and would start now"
        yield near, replace(spec, within_required=False)
    if spec.gpu_models:
        yield "with any GPU model it would start now", replace(spec, gpu_models=())
    if spec.whole_nodes:
        yield (
            "beside others, without --whole-nodes, it would start now",
            replace(spec, whole_nodes=False),
        )
    if spec.members_per_node:
        yield "spread without --per-node it would start now", replace(spec, members_per_node=0)
    for members in _halves(spec.members):
        if not spec.members_per_node or members % spec.members_per_node == 0:
            text = f"with {plural(members, 'member')} instead of {spec.members} it would start now"
            yield text, replace(spec, members=members, members_max=0)
            break
    for gpus in _halves(spec.gpus):
        text = f"with {plural(gpus, 'GPU')} per member instead of {spec.gpus} it would start now"
        yield text, replace(spec, gpus=gpus)


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def _closed(state: State, job: Job) -> list[str]:
    """Nodes that stand open for nothing because somebody said so."""
    closed = [
        node.id
        for node in state.order
        if node.health is NodeHealth.READY
        and node.intent in (NodeIntent.CORDONED, NodeIntent.DRAINING)
        and state.rooms[node.index].holds(job.spec.demand)
    ]
    if not closed:
        return []
    more = f" and {len(closed) - 3} more" if len(closed) > 3 else ""
    return [f"{', '.join(closed[:3])}{more} would have room: shoal uncordon {closed[0]}"]
