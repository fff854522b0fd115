"""What would let a waiting job start now: small changes to its request, tried on the real state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from shoal.core.scheduling.ends import too_short
from shoal.core.scheduling.fit import fit, shortage
from shoal.core.state.queue import gang_of_spec
from shoal.core.state.state import State
from shoal.model.job import Job, JobSpec, Phase, Within
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.resources import plural
from shoal.model.views import Remedy

Changes = Iterator[tuple[str, JobSpec, dict[str, Any]]]  # in words, in the spec, in its fields


def advise(state: State, job: Job, now_ms: int) -> list[Remedy]:
    """The smallest change first; none if nothing small would help."""
    if job.phase is not Phase.WAITING or job.elements is not None:
        return []
    if job.id in state.claims or job.awaits:
        return []
    if job.not_before_ms > now_ms:
        return []
    if tenant := state.accounts.held_by(job.spec.tenant):  # no smaller request gets past it
        text = f"an admin may raise the budget of {tenant} in the policy"
        return [Remedy(text=text, tenant=tenant)]
    if not shortage(state, gang_of_spec(job.spec)):
        return []  # the queue holds it, and its reason says enough
    return [*_smaller(state, job, now_ms), *_closed(state, job)]


def _smaller(state: State, job: Job, now_ms: int) -> Iterator[Remedy]:
    """The smallest sufficient change of each kind."""
    spec, short = job.spec, too_short(state, job, now_ms)
    for changes in (_freer(spec), _fewer_members(spec), _fewer_gpus(spec)):
        for text, changed, fields in changes:
            if fit(state, gang_of_spec(changed), short) is not None:
                yield Remedy(text=f"{text} it would start now", fields=fields)
                break


def _freer(spec: JobSpec) -> Changes:
    replace = msgspec.structs.replace
    if spec.within_required and spec.within is not Within.ANYWHERE:
        text = f"if it need not stay in one {spec.within.value}"
        yield text, replace(spec, within_required=False), {"strict": False}
    if spec.where:
        text = f"without --where {','.join(spec.where)}"
        yield text, replace(spec, where=()), {"where": []}
    if spec.together:
        text = f"if it need not stay in one {spec.together}"
        yield text, replace(spec, together=""), {"together": ""}
    if spec.gpu_models:
        yield "with any model of GPU", replace(spec, gpu_models=()), {"gpu_model": []}
    if spec.whole_nodes:
        yield "without --whole-nodes", replace(spec, whole_nodes=False), {"whole_nodes": False}
    if spec.members_per_node and not spec.launcher:
        text = "without a fixed number of members per node"
        yield text, replace(spec, members_per_node=0), {"per_node": ""}


def _fewer_members(spec: JobSpec) -> Changes:
    for members in _halves(spec.members):
        if not spec.members_per_node or members % spec.members_per_node == 0:
            text = f"with {plural(members, 'member')} instead of {spec.members}"
            changed = msgspec.structs.replace(spec, members=members, members_max=0)
            yield text, changed, {"members": str(members)}


def _fewer_gpus(spec: JobSpec) -> Changes:
    for gpus in _halves(spec.gpus):
        text = f"with {plural(gpus, 'GPU')} per member instead of {spec.gpus}"
        yield text, msgspec.structs.replace(spec, gpus=gpus), {"gpus": str(gpus)}


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def _closed(state: State, job: Job) -> list[Remedy]:
    """Cordoned nodes that would have room."""
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
    text = f"{', '.join(closed[:3])}{more} would have room: shoal uncordon {closed[0]}"
    return [Remedy(text=text, node=closed[0])]
