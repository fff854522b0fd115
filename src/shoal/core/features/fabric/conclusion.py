"""From what a tour measured to what the state keeps of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.core.features.fabric.groups import joined_places, places_of
from shoal.core.features.fabric.judging import WEAK_MAX, Judged, judge
from shoal.core.features.fabric.links import Table
from shoal.model.fabric import Fabric, Tier, Weak
from shoal.model.health import CheckResult

ONE_PLACE = "m1/r1"


def conclude(
    table: Table,
    before: Fabric,
    typed: Mapping[str, str],
    *,
    whole: bool,
    about: str = "",
    one_machine: bool = False,
    results: Mapping[str, CheckResult] | None = None,
) -> tuple[Fabric, Judged]:
    """What is known now, and what this tour itself shows. Only a tour of the `whole` cluster
    finds groups: a few nodes that are far from each other would look like one. Between nodes of
    `one_machine` there is no network: their rates show what else it was doing."""
    if one_machine:
        places = {**before.places, **dict.fromkeys(table.names, ONE_PLACE)}
    elif whole:
        places = {**before.places, **places_of(table, before.places, typed)}
    else:
        places = {**before.places, **joined_places(table, before, about)}
    judged = with_collectives(judge(table, places, before.tiers), results or {})
    if one_machine:
        broken = tuple(one for one in judged.weak if not one.mbs and one.peer)
        judged = judged._replace(weak=broken, more=0)
    tiers = judged.tiers
    if not whole and before.tiers:
        tiers = before.tiers
    usual = next((tier for tier in reversed(tiers) if tier.mbs), Tier())
    fabric = msgspec.structs.replace(
        before,
        places=places,
        tiers=tiers,
        usual_mbs=usual.mbs,
        usual_latency_us=usual.latency_us,
        weak=judged.weak + _still_weak(table, before.weak, judged.weak, about),
    )
    return fabric, judged


def with_collectives(judged: Judged, results: Mapping[str, CheckResult]) -> Judged:
    """Nodes and links that slowed collectives down, beside those that pairs show: where GPUs talk
    past the host, pairs over TCP show nothing."""
    known = {(one.node, one.peer) for one in judged.weak}
    found = {
        (one.node, one.peer): one
        for result in results.values()
        for one in result.weak
        if (one.node, one.peer) not in known
        and one.node in results
        and (not one.peer or one.peer in results)
    }
    return judged._replace(weak=(*judged.weak, *found.values())[:WEAK_MAX])


def _still_weak(
    table: Table, before: tuple[Weak, ...], now: tuple[Weak, ...], about: str
) -> tuple[Weak, ...]:
    """Of what was weak before: that which this tour did not measure. The node that it is `about` is
    well if its only link is."""
    known = {(one.node, one.peer) for one in now}
    if about in table.at and not now and any(table.rates[table.at[about]]):
        known.add((about, ""))
    return tuple(
        one
        for one in before
        if (one.node, one.peer) not in known and not _measured(table, one.node, one.peer)
    )


def _measured(table: Table, node: str, peer: str) -> bool:
    own, other = table.at.get(node), table.at.get(peer)
    if own is None:
        return False
    if peer:
        return other is not None and bool(table.rates[own][other])
    return sum(map(bool, table.rates[own])) > 1
