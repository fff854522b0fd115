"""Index upkeep for labels and taints: nodes change their kinds with what jobs ask about."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.state.apply_room import change_kind
from shoal.core.state.asked import kind_of, taken_apart
from shoal.core.state.state import Node, State
from shoal.model.job import Job

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
        look_at(state, {**state.asked, **dict.fromkeys(fresh)})
        _sort_again(state, concerned(state, fresh))


def ask_no_more(state: State, job: Job) -> None:
    words = job.spec.asked
    for word in words:
        state.asking[word] -= 1
        if not state.asking[word]:
            del state.asking[word]
    if words and len(state.asked) > 2 * len(state.asking) + STALE_MAX:
        look_at(state, {word: None for word in state.asked if word in state.asking})
        _sort_again(state, state.order)


def look_at(state: State, asked: dict[str, None]) -> None:
    state.asked, state.looks_at = asked, taken_apart(asked)


def concerned(state: State, fresh: list[str]) -> list[Node]:
    """Nodes that these words may be true of."""
    taints = any(word.startswith("~") for word in fresh)
    wanted: dict[str, set[str]] = {}
    for key, equals, value in (word.partition("=") for word in fresh if not word.startswith("~")):
        wanted.setdefault(key, set()).add(value if equals else "*")
    return [
        node
        for node in state.order
        if (taints and node.taints)
        or any(
            (has := node.label(key)) is not None and ("*" in values or has in values)
            for key, values in wanted.items()
        )
    ]


def _sort_again(state: State, nodes: Iterable[Node]) -> None:
    for node in nodes:
        kind = kind_of(state.looks_at, node)
        if kind != state.rooms[node.index].kind:
            change_kind(state, node, kind)
