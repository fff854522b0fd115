"""Index upkeep for labels and taints: nodes change their kinds with what jobs ask about."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.state.apply_room import change_kind, close, open_up
from shoal.core.state.asked import kind_of
from shoal.core.state.state import Node, State
from shoal.model.events import NodeLabelled
from shoal.model.job import Job
from shoal.model.labels import Words

# What no live job asks about any more is forgotten when there is this much more of it than of what
# some job asks about: jobs that come and go with the same wish should move no node.
STALE_MAX = 64


def ask(state: State, job: Job) -> None:
    """A job has come: nodes that differ in what it asks about are of different kinds from now."""
    words = job.spec.asked
    for word in words:
        state.asking[word] = state.asking.get(word, 0) + 1
    fresh = [word for word in words if word not in state.asked]
    if fresh:
        state.asked.update(dict.fromkeys(fresh))
        _sort_again(state, concerned(state, fresh))


def ask_no_more(state: State, job: Job) -> None:
    words = job.spec.asked
    for word in words:
        state.asking[word] -= 1
        if not state.asking[word]:
            del state.asking[word]
    if words and len(state.asked) > 2 * len(state.asking) + STALE_MAX:
        state.asked = {word: None for word in state.asked if word in state.asking}
        _sort_again(state, state.order)


def concerned(state: State, fresh: list[str]) -> list[Node]:
    """Nodes that these words may be true of."""
    taints = any(word.startswith("~") for word in fresh)
    wanted: Words = tuple(word for word in fresh if not word.startswith("~"))
    keys = [(key, value) for key, _, value in (word.partition("=") for word in wanted)]
    found = []
    for node in state.order:
        labels = node.labels
        if (taints and node.taints) or any(
            key in labels and value in ("", "*", labels[key]) for key, value in keys
        ):
            found.append(node)
    return found


def _sort_again(state: State, nodes: Iterable[Node]) -> None:
    for node in nodes:
        kind = kind_of(state.asked, node)
        if kind != state.rooms[node.index].kind:
            change_kind(state, node, kind)


def node_labelled(state: State, event: NodeLabelled) -> None:
    """Running jobs stay where they are; the next placement sees the new labels."""
    node = state.nodes[event.node]
    close(state, node)
    node.labels_set, node.taints_set = event.labels, event.taints
    change_kind(state, node, kind_of(state.asked, node), closed=True)
    open_up(state, node)
