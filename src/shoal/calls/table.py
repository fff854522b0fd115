"""The table of all calls, and which of them a path means."""

from __future__ import annotations

from typing import Any

from shoal.calls.call import Call, declared_in
from shoal.calls.cluster import ClusterCalls, NodeCalls, ServiceCalls
from shoal.calls.jobs import FlowCalls, JobCalls
from shoal.calls.page import MachineCalls, PageCalls
from shoal.calls.people import NoticeCalls, PeopleCalls, SecretCalls

GROUPS: dict[str, type] = {
    "Jobs": JobCalls,
    "Workflows and schedules": FlowCalls,
    "Services": ServiceCalls,
    "Nodes": NodeCalls,
    "The cluster": ClusterCalls,
    "People": PeopleCalls,
    "Secrets": SecretCalls,
    "Notices": NoticeCalls,
    "The page": PageCalls,
    "Machines": MachineCalls,
}
TABLE: tuple[Call, ...] = tuple(call for group in GROUPS.values() for call in declared_in(group))

_ANY = "{}"  # any one segment


def _tree() -> dict[str, Any]:
    """By the segments of paths, then by method below ""."""
    tree: dict[str, Any] = {}
    for call in TABLE:
        branch = tree
        for text, name in call.parts:
            branch = branch.setdefault(f"/{text}" if not name else _ANY, {})
        branch.setdefault("", {})[call.method] = call
    return tree


_TREE = _tree()


def methods_at(segments: list[str]) -> dict[str, Call] | None:
    """The calls of a path by their methods; None: it has none. Text goes before parameters."""
    return _calls(_TREE, segments, 0)


def match(method: str, path: str) -> tuple[Call, dict[str, str]] | None:
    """The call that is meant, and the parameters in its path."""
    segments = path.split("/")[1:]
    calls = methods_at(segments)
    if calls is None or method not in calls:
        return None
    call = calls[method]
    named = zip(call.parts, segments, strict=True)
    return call, {name: segment for (_, name), segment in named if name}


def _calls(branch: dict[str, Any], segments: list[str], at: int) -> dict[str, Call] | None:
    if at == len(segments):
        return branch.get("")
    segment = segments[at]
    for key in (f"/{segment}", _ANY) if segment else ("/",):
        if key in branch and (calls := _calls(branch[key], segments, at + 1)) is not None:
            return calls
    return None
