"""What would let a waiting job start now: small changes, each tried before it is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from shoal.core.answers.preview import closed_text
from shoal.core.answers.trial import Trial, Trials, submitted, tried
from shoal.core.features.workflow import has_others
from shoal.core.scheduling.ends import too_short
from shoal.core.scheduling.fit import fit, shortage
from shoal.core.state.gpu_caps import capped_by
from shoal.core.state.queue import gang_of_spec
from shoal.core.state.state import Node, State
from shoal.model.health import Standing
from shoal.model.job import Job, JobSpec, Phase, Within
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.reason import tenant_part
from shoal.model.resources import plural
from shoal.model.views import Remedy

Changes = Iterator[tuple[str, JobSpec, dict[str, Any]]]  # in words, in the spec, in its fields
CLOSED_TRIED_MAX = 8  # closed nodes, one by one and then together


def advise(state: State, job: Job, now_ms: int) -> list[Remedy]:
    """The smallest change first; none if nothing small would help. Each was tried: if nothing else
    happens before, it lets the job start in the next step."""
    if job.phase is not Phase.WAITING or job.elements is not None:
        return []
    if job.id in state.claims or job.awaits:
        return []
    if job.not_before_ms > now_ms:
        return []
    if tenant := state.accounts.held_by(job.spec.tenant):  # no smaller request gets past it
        text = f"an admin can raise the budget of {tenant_part(tenant)} in the policy"
        return [Remedy(text=text, tenant=tenant, how="policy")]
    if job.number in state.queue.capped_lane:
        top = capped_by(state, job.spec.tenant, gang_of_spec(job.spec).gpu_milli)
        text = f"an admin can raise gpus_max of {tenant_part(top)} in the policy"
        smaller = _smaller(state, job, now_ms, Trials()) if not job.spec.service else ()
        return [*smaller, Remedy(text=text, tenant=top, how="policy")]
    if job.number not in state.queue.lane or not shortage(state, gang_of_spec(job.spec)):
        return []  # the queue holds it, and its reason says enough
    trials = Trials()
    smaller = _smaller(state, job, now_ms, trials) if not job.spec.service else ()
    return [*smaller, *_closed(state, job, now_ms, trials)]


def _smaller(state: State, job: Job, now_ms: int, trials: Trials) -> Iterator[Remedy]:
    """The smallest sufficient change of each kind."""
    spec, short = job.spec, too_short(state, job, now_ms)
    in_place = not job.attempt and not has_others(state, job)
    how, where = ("change", "it would") if in_place else ("resubmit", "a new job would")
    for changes in (_freer(spec), _fewer_members(spec), _fewer_gpus(spec)):
        for text, changed, fields in changes:
            if fit(state, gang_of_spec(changed), short) is None:
                continue
            new = submitted(state, changed, now_ms)
            trial = tried(state, new, now_ms, trials, gone=job if in_place else None)
            if trial is not None:
                starts = f"{text}, {where} start now"
                yield Remedy(text=starts, fields=fields, how=how, cost=trial.cost)
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


def _closed(state: State, job: Job, now_ms: int, trials: Trials) -> list[Remedy]:
    """Nodes that somebody closed and that it would start on: one, or as many as it needs. Those
    that were closed for a reason come last, and are not to be opened by a click."""
    demand = job.spec.demand
    free: list[Node] = []
    careful: list[Node] = []
    for node in state.order:
        room = state.rooms[node.index]
        if _may_open(state, node) and demand.suits(room.kind) and room.holds(demand):
            (careful if _reason(node) else free).append(node)
    for nodes in (free, [*free, *careful]) if careful else (free,):
        nodes = nodes[:CLOSED_TRIED_MAX]
        trial = tried(state, job, now_ms, trials, opened=nodes) if nodes else None
        if trial is not None:
            few, trial = _fewest(state, job, nodes, now_ms, trials) or (nodes, trial)
            return [_opened(few, trial, now_ms)]
    return []


def _fewest(
    state: State, job: Job, nodes: list[Node], now_ms: int, trials: Trials
) -> tuple[list[Node], Trial] | None:
    """One of these nodes, or the first few of them; None: all are needed."""
    alike = {(state.rooms[n.index].kind, state.rooms[n.index].level): n for n in reversed(nodes)}
    single = sorted(alike.values(), key=nodes.index)
    for few in [[node] for node in single] + [nodes[:count] for count in range(2, len(nodes))]:
        trial = tried(state, job, now_ms, trials, opened=few)
        if trial is not None:
            return few, trial
    return None


def _opened(nodes: list[Node], trial: Trial, now_ms: int) -> Remedy:
    names = [node.id for node in nodes]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    said = [f"{node.id} was {closed_text(node, now_ms)}" for node in nodes]
    first = [f"{job.mention} starts first" for job in trial.before[:1]]
    one_click = len(names) == 1 and not _reason(nodes[0])
    return Remedy(
        text=f"if {listed} {'is' if len(names) == 1 else 'are'} uncordoned, it would start now",
        how="uncordon",
        node=names[0] if one_click else "",
        nodes=names,
        cost="; ".join(filter(None, (*said, *first, trial.cost))),
    )


def _may_open(state: State, node: Node) -> bool:
    """Only somebody's wish keeps it closed, and nobody who sleeps there is to wake."""
    order = state.orders.get(node.spec.order)
    given_back = bool(node.spec.order) and (order is None or bool(order.release))
    return (
        node.health is NodeHealth.READY
        and node.intent in (NodeIntent.CORDONED, NodeIntent.DRAINING)
        and node.record.standing is not Standing.QUARANTINED
        and not node.leaving
        and node.closed_from is None
        and not given_back
        and not any(job.id in state.wakeful for job in state.placed[node.id].values())
    )


def _reason(node: Node) -> str:
    """What its operator gave as a reason."""
    return node.intent_why.partition(": ")[2]
