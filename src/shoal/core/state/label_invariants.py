"""The invariants of labels and taints, in code that shares nothing with the code it verifies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.core.state.state import Node, State
    from shoal.model.job import JobSpec


def placement_problem(state: State, spec: JobSpec, node_ids: Iterable[str]) -> str:
    """What is wrong with a placement that was made in this step; empty if nothing is."""
    values = set()
    for node_id in node_ids:
        node = state.nodes[node_id]
        labels = _labels(node)
        if spec.together:
            values.add(labels.get(spec.together))
        for condition in spec.where:
            if not _holds(condition, labels):
                return f"{node_id} does not have {condition}"
        for taint in _taints(node):
            if not {"*", taint, taint.split("=")[0]} & set(spec.tolerates):
                return f"{node_id} is tainted {taint}"
    if len(values) > 1 or None in values:
        return f"its nodes differ in {spec.together}: {sorted(map(str, values))}"
    return ""


def kinds_problem(state: State) -> str:
    """Whether the scheduler sees of each node what some job asks about, and nothing else."""
    asked = set(state.asked)
    for job in state.jobs.values():
        if missing := _words(job.spec) - asked:
            return f"{job.id} asks about {sorted(missing)}, which is not looked at"
    for node, room in zip(state.order, state.rooms, strict=True):
        labels = _labels(node)
        true = {*labels, *(f"{key}={value}" for key, value in labels.items())}
        every = {word for word in true if "=" in word and f"{word.split('=')[0]}=*" in asked}
        seen = tuple(sorted((true & asked) | every))
        taints = {
            taint if {f"~{taint}", f"~{taint.split('=')[0]}"} & asked else "*"
            for taint in _taints(node)
        }
        if room.kind != (*node.spec.kind[:6], seen, tuple(sorted(taints))):
            return f"{node.spec.id} counts as {room.kind}"
    return ""


def _labels(node: Node) -> dict[str, str]:
    labels = dict(node.spec.labels)
    for key, value in node.labels_set.items():
        labels.pop(key, None)
        if value is not None:
            labels[key] = value
    labels["node"] = node.spec.id
    return labels


def _taints(node: Node) -> list[str]:
    reported = [one for one in node.spec.taints if one.split("=")[0] not in node.taints_set]
    own = {key: value for key, value in node.taints_set.items() if value is not None}
    return reported + [f"{key}={value}" if value else key for key, value in own.items()]


def _holds(condition: str, labels: dict[str, str]) -> bool:
    if "!=" in condition:
        key, values = condition.split("!=")
        return labels.get(key) not in values.split("|")
    if "=" in condition:
        key, values = condition.split("=")
        return labels.get(key) in values.split("|")
    return condition[1:] not in labels if condition[0] == "!" else condition in labels


def _words(spec: JobSpec) -> set[str]:
    found = {f"~{toleration}" for toleration in spec.tolerates if toleration != "*"}
    for condition in spec.where:
        key, equals, values = condition.replace("!", "").partition("=")
        found |= {f"{key}={value}" for value in values.split("|")} if equals else {key}
    for key in (spec.spread, spec.together):
        found |= {key, f"{key}=*"} if key else set()
    return found
