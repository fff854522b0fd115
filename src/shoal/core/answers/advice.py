"""What would let a waiting job start now: small changes to its request, tried on the real state."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.core.scheduling.ends import too_short
from shoal.core.scheduling.fit import fit, shortage
from shoal.core.state.queue import gang_of_spec
from shoal.core.state.state import State
from shoal.model.job import Job, JobSpec, Phase, Within
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.resources import plural


def advise(state: State, job: Job, now_ms: int) -> list[str]:
    """Sentences, the smallest change first; none if nothing small would help."""
    if job.phase is not Phase.WAITING or job.id in state.claims or job.awaits:
        return []
    if job.not_before_ms > now_ms:
        return []
    if state.accounts.held_by(job.spec.tenant):
        return []  # no smaller request gets past its budget
    if not shortage(state, gang_of_spec(job.spec)):
        return []  # the queue holds it, and its reason says enough
    return [*_smaller(state, job, now_ms), *_closed(state, job)]


def _smaller(state: State, job: Job, now_ms: int) -> Iterator[str]:
    """The smallest sufficient change of each kind."""
    spec, short = job.spec, too_short(state, job, now_ms)
    for changes in (_freer(spec), _fewer_members(spec), _fewer_gpus(spec)):
        for text, changed in changes:
            if fit(state, gang_of_spec(changed), short) is not None:
                yield f"{text} it would start now"
                break


def _freer(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    replace = msgspec.structs.replace
    if spec.within_required and spec.within is not Within.ANYWHERE:
        yield (
            f"if it need not stay in one {spec.within.value}",
            replace(spec, within_required=False),
        )
    if spec.where:
        yield f"without --where {','.join(spec.where)}", replace(spec, where=())
    if spec.together:
        yield f"if it need not stay in one {spec.together}", replace(spec, together="")
    if spec.gpu_models:
        yield "with any model of GPU", replace(spec, gpu_models=())
    if spec.whole_nodes:
        yield "without --whole-nodes", replace(spec, whole_nodes=False)
    if spec.members_per_node:
        yield "without a fixed number of members per node", replace(spec, members_per_node=0)


def _fewer_members(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    for members in _halves(spec.members):
        if not spec.members_per_node or members % spec.members_per_node == 0:
            text = f"with {plural(members, 'member')} instead of {spec.members}"
            yield text, msgspec.structs.replace(spec, members=members, members_max=0)


def _fewer_gpus(spec: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    for gpus in _halves(spec.gpus):
        text = f"with {plural(gpus, 'GPU')} per member instead of {spec.gpus}"
        yield text, msgspec.structs.replace(spec, gpus=gpus)


def _halves(number: int) -> Iterator[int]:
    while number > 1:
        number //= 2
        yield number


def _closed(state: State, job: Job) -> list[str]:
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
    return [f"{', '.join(closed[:3])}{more} would have room: shoal uncordon {closed[0]}"]
