"""A node's word counts for its own members: what it reports of others reaches no phase."""

from __future__ import annotations

from collections.abc import Callable, Container
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from shoal.model.job import MemberRef
from shoal.model.report import NodeReport


class Strays(NamedTuple):
    """Members that a node names and that are not placed there. Nothing is believed of them: they
    are stopped, and their exits acknowledged."""

    alive: tuple[MemberRef, ...] = ()  # with those that are getting ready
    stopping: tuple[MemberRef, ...] = ()
    exits: tuple[MemberRef, ...] = ()


NONE = Strays()


def split(report: NodeReport, placed: Container[MemberRef]) -> tuple[NodeReport, Strays]:
    """The report with the members that are placed on its node, each named once in a field; and the
    others."""
    own: dict[str, tuple[Any, ...]] = {}
    others: dict[str, tuple[MemberRef, ...]] = {}
    for name, ref_of in NAMING.items():
        said = getattr(report, name)
        if not said:
            continue
        by_ref = (
            {ref_of(one): one for one in said} if ref_of else dict(zip(said, said, strict=True))
        )
        strays = [ref for ref in by_ref if ref not in placed]
        if strays:
            others[name] = tuple(strays)
        if strays or len(by_ref) != len(said):
            own[name] = tuple(one for ref, one in by_ref.items() if ref in placed)
    if not own:
        return report, NONE
    alive = (*others.get("alive", ()), *others.get("getting", ()))
    strays_ = Strays(alive, others.get("stopping", ()), others.get("exits", ()))
    return msgspec.structs.replace(report, **own), strays_


def present(report: NodeReport, strays: Strays) -> dict[MemberRef, None]:
    """Everything that holds something there: alive, or getting ready."""
    return dict.fromkeys((*report.alive, *(one.ref for one in report.getting), *strays.alive))


def _naming() -> dict[str, Callable[[Any], MemberRef] | None]:
    """The fields of a report that name members, read from its declaration: one that is added later
    is narrowed, too. None: its items are their names."""
    found: dict[str, Callable[[Any], MemberRef] | None] = {}
    for name, hint in get_type_hints(NodeReport).items():
        for inner in get_args(hint):
            if inner is MemberRef:
                found[name] = None
            elif "ref" in getattr(inner, "__struct_fields__", ()):
                found[name] = attrgetter("ref")
    return found


NAMING = _naming()
