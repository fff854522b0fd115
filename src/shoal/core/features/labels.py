"""Labels and taints of nodes: requests that change them, and jobs that they keep from starting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from shoal.core.state.apply_labels import concerned
from shoal.core.state.asked import kind_of, taken_apart, words_of_node
from shoal.core.state.events.nodes import NodeLabelled
from shoal.core.state.queue import Gang
from shoal.core.state.round import Round
from shoal.core.state.state import Node, State
from shoal.model.job import JobSpec
from shoal.model.labels import (
    NODE,
    WIREGUARD,
    admits,
    changed,
    meets,
    taint_pairs,
    taint_text,
    term_of,
    tolerated,
)
from shoal.model.node import LABELS_MAX, LabelChange, NodeIntent
from shoal.model.report import Accepted, Answer, Refused, SetLabels
from shoal.model.resources import Kind, plural

NAMED_MAX = 8
NO_WIREGUARD = (
    "no node can encrypt a gang's network: that takes an agent that is root, the programs ip and "
    "wg, and WireGuard in the kernel or wireguard-go; see docs/fabric.md"
)


def set_labels(round_: Round, request: SetLabels) -> Answer:
    node = round_.state.nodes.get(request.node)
    if node is None:
        return Refused("node", f"there is no node {request.node}", missing=True)
    change = request.change
    if NODE in change.labels:
        return Refused("labels", f"{NODE} is the node's own name and cannot be changed")
    if WIREGUARD in change.labels:
        return Refused("labels", f"{WIREGUARD} is what the node's agent says, and nobody else")
    reported = taint_pairs(node.spec.taints)
    labels = _over(node.spec.labels, {**node.labels_set, **change.labels})
    taints = _over(reported, {**node.taints_set, **change.taints})
    for field, below, above in (
        ("labels", node.spec.labels, labels),
        ("taints", reported, taints),
    ):
        if len(changed(below, above)) > LABELS_MAX:
            return Refused(field, f"a node has at most {LABELS_MAX} of them; remove some: KEY-")
    if (labels, taints) == (node.labels_set, node.taints_set):
        return Accepted(node.id, "no change")
    why = f"{_text(change)} by {request.who}"
    round_.emit(
        NodeLabelled(at_ms=round_.now_ms, node=node.id, labels=labels, taints=taints, why=why)
    )
    return Accepted(node.id)


def _over(reported: Mapping[str, str], wanted: Mapping[str, str | None]) -> dict[str, str | None]:
    """Only what differs from the node's own report is kept."""
    return {
        key: value
        for key, value in sorted(wanted.items())
        if value != reported.get(key) and (value is not None or key in reported)
    }


def _text(change: LabelChange) -> str:
    changes = [
        (f"{key}={value}" if value is not None else f"{key}-", "labeled")
        for key, value in change.labels.items()
    ]
    changes += [
        (taint_text(key, value) if value is not None else f"{key}-", "tainted")
        for key, value in change.taints.items()
    ]
    parts = []
    for verb in ("labeled", "tainted"):
        named = [text for text, done in changes if done == verb]
        more = f" and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
        parts += [f"{verb} {', '.join(named[:NAMED_MAX])}{more}"] if named else []
    return " and ".join(parts)


VALUES_NAMED_MAX = 6


# More values than this would make more kinds of nodes than the scheduler can walk quickly.
VALUES_MAX = 256


def kinds_if_asked(state: State, spec: JobSpec) -> Mapping[int, Kind]:
    """Nodes, by index, that would be of another kind if this job came. Nothing changes."""
    fresh = [word for word in spec.asked if word not in state.asked]
    if not fresh:
        return {}
    asked = taken_apart({**state.asked, **dict.fromkeys(fresh)})
    return {node.index: kind_of(asked, node) for node in concerned(state, fresh)}


def kinds_with(state: State, as_if: Mapping[int, Kind]) -> list[Kind]:
    """The kinds of all known nodes, if these nodes were of those kinds."""
    counts = Counter(state.capacity)
    for index, kind in as_if.items():
        if state.order[index].intent is not NodeIntent.REMOVED:
            counts[state.rooms[index].kind] -= 1
            counts[kind] += 1
    return [kind for kind, count in counts.items() if count]


def no_such_labels(state: State, spec: JobSpec, kinds: Iterable[Kind]) -> tuple[str, str] | None:
    """The field at fault and the problem, if no node of these kinds meets its conditions or has the
    label to spread over. Taints do not count: like a cordon, they may go away."""
    where = spec.demand.where
    if not where and not spec.spread:
        return None  # most jobs: none of the nodes is looked at for them
    spreads = not spec.spread or any(spec.spread in kind.labels for kind in kinds)
    if spreads and (
        not where or any(admits(where, ("*",), kind.labels, kind.taints) for kind in kinds)
    ):
        return None
    known = [node for node in state.order if node.intent is not NodeIntent.REMOVED]
    if not spreads:
        return "spread", f"no node has the label {spec.spread}; there are: {_keys(known)}"
    problem = _unmet(known, where)
    if problem == NO_WIREGUARD:
        return "encrypt_network", problem
    return ("together" if spec.together and not spec.where else "where"), problem


def too_many_values(state: State, spec: JobSpec) -> tuple[str, str] | None:
    for field, key in (("spread", spec.spread), ("together", spec.together)):
        if not key:
            continue
        values = _values(state, key)
        if values > VALUES_MAX:
            return field, (
                f"{key} has {values} values; the maximum is {VALUES_MAX}; use a label with "
                "fewer, such as a zone"
            )
    return None


def _values(state: State, key: str) -> int:
    """How many values of the label known nodes have. Once a job has asked about all of them, the
    kinds of nodes show it."""
    if f"{key}=*" not in state.asked:
        return len({node.label(key) for node in state.order} - {None})
    start = f"{key}="
    words = (word for kind, count in state.capacity.items() if count for word in kind.labels)
    return len({word for word in words if word.startswith(start)})


def label_note(state: State, gang: Gang) -> str:
    """Something to add to why a gang waits: no open node meets its conditions, or those that do
    and have room are tainted."""
    demand = gang.demand
    nodes = [node for node in state.order if node.schedulable]
    if demand.where:
        nodes = [node for node in nodes if _meets_all(node, demand.where)]
        if not nodes:
            known = [node for node in state.order if node.intent is not NodeIntent.REMOVED]
            closed = [node for node in known if _meets_all(node, demand.where)]
            return _closed(closed, demand.where) if closed else _unmet(known, demand.where)
    freely = demand._replace(tolerates=("*",))
    hindered = [
        node
        for node in nodes
        if not all(tolerated(taint, demand.tolerates) for taint in node.taints)
        and state.rooms[node.index].holds(freely)
    ]
    if not hindered:
        return _cannot_encrypt(state) if WIREGUARD in demand.where else ""
    taints = Counter(
        taint
        for node in hindered
        for taint in node.taints
        if not tolerated(taint, demand.tolerates)
    )
    named = [taint for taint, _ in taints.most_common(VALUES_NAMED_MAX)]
    are = "node with room is" if len(hindered) == 1 else "nodes with room are"
    return (
        f"{len(hindered)} {are} tainted {', '.join(named)}; to run there, add "
        f"--tolerates {','.join(named)}"
    )


def _cannot_encrypt(state: State) -> str:
    lacking = [n.id for n in state.order if n.schedulable and n.label(WIREGUARD) is None]
    more = f" and {len(lacking) - NAMED_MAX} more" if len(lacking) > NAMED_MAX else ""
    named = ", ".join(lacking[:NAMED_MAX])
    return f"{named}{more} cannot encrypt a gang's network" if lacking else ""


def _meets_all(node: Node, where: Iterable[str]) -> bool:
    words = words_of_node(node)
    return all(meets(condition, words) for condition in where)


def _closed(nodes: list[Node], where: tuple[str, ...]) -> str:
    named = ", ".join(node.id for node in nodes[:VALUES_NAMED_MAX])
    more = f" and {len(nodes) - VALUES_NAMED_MAX} more" if len(nodes) > VALUES_NAMED_MAX else ""
    are = "node is" if len(nodes) == 1 else "nodes are"
    return f"only {named}{more} could run it ({', '.join(where)}), and the {are} closed or lost"


def _unmet(nodes: list[Node], where: tuple[str, ...]) -> str:
    """Which condition no node meets, and what there is instead."""
    for condition in where:
        if not any(_meets_all(node, (condition,)) for node in nodes):
            key = term_of(condition).key
            if key == WIREGUARD:
                return NO_WIREGUARD
            values = Counter(node.labels[key] for node in nodes if key in node.labels)
            if values:
                named = [
                    f"{key}={value} ({plural(count, 'node')})"
                    for value, count in values.most_common(VALUES_NAMED_MAX)
                ]
                more = len(values) - len(named)
                there = f"there are: {', '.join(named)}{f' and {more} more' if more > 0 else ''}"
            else:
                there = f"no node has the label {key}; the labels are: {_keys(nodes)}"
            return f"no node has {condition}; {there}" if values else there
    return f"no node has all of {', '.join(where)}; each of them is met by some node"


def _keys(nodes: Iterable[Node]) -> str:
    keys = Counter(key for node in nodes for key in node.labels)
    named = [key for key, _ in keys.most_common(VALUES_NAMED_MAX)]
    more = len(keys) - len(named)
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


# -- what always holds, in code that shares nothing with the code above ----------------------------


def placement_violation(state: State, spec: JobSpec, node_ids: Iterable[str]) -> str:
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
        if spec.encrypt_network and len({*node_ids}) > 1 and "wireguard" not in labels:
            return f"{node_id} cannot encrypt its network"
        for taint in _taints(node):
            if not {"*", taint, taint.split("=")[0]} & set(spec.tolerates):
                return f"{node_id} is tainted {taint}"
    if len(values) > 1 or None in values:
        return f"its nodes differ in {spec.together}: {sorted(map(str, values))}"
    return ""


def labels_violation(state: State) -> str:
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
    if spec.encrypt_network and max(spec.members, spec.members_max) > 1:
        found.add("wireguard")
    for condition in spec.where:
        key, equals, values = condition.replace("!", "").partition("=")
        found |= {f"{key}={value}" for value in values.split("|")} if equals else {key}
    for key in (spec.spread, spec.together):
        found |= {key, f"{key}=*"} if key else set()
    return found
