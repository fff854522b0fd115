"""Halves against halves: which pairs of hosts measure when, and what the cut between them carries.

A link may be as fast as it should while its pair is alone, and slow when everybody talks, because
switches share what leads upward. So some pairs across a cut measure one at a time, and then all of
them at the same moment. What they carry alone, added up, is the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from shoal.model.fabric import Cut, HalvesView, Pair, rate_text
from shoal.model.health import CheckResult
from shoal.model.resources import plural

ALONE_MAX = 4  # pairs of a cut that measure one at a time
HOSTS_MIN = 4  # of fewer, no two pairs could meet on the way
OVER_ALL = "all"

Slots = list[dict[int, int]]  # who meets whom: by host, its partner


def cuts_of(places: Sequence[str]) -> tuple[Cut, ...]:
    """Of hosts in the order of their places. Each rack that is large enough is cut in the middle,
    all of them at the same time; then all hosts, between racks where that is possible. The first
    host of a pair is always on the same side, so that all of them send the same way."""
    racks = [[host for host, _ in group] for _, group in groupby(enumerate(places), lambda p: p[1])]
    inside = []
    if len(racks) > 1:
        inside = [
            Cut(places[rack[0]], _pairs(rack, len(rack) // 2))
            for rack in racks
            if len(rack) >= HOSTS_MIN
        ]
    hosts, half = list(range(len(places))), len(places) // 2
    middle = min((rack[0] for rack in racks[1:]), key=lambda at: abs(at - half), default=half)
    found: list[Cut] = []
    first = 0
    for cuts in (inside, [Cut(OVER_ALL, _pairs(hosts, middle))]):
        most = max((len(cut.pairs) for cut in cuts), default=0)
        alone = min(most, ALONE_MAX)
        found += [
            Cut(cut.name, cut.pairs, first, min(alone, len(cut.pairs)), first + alone)
            for cut in cuts
        ]
        first += alone + bool(cuts)
    return tuple(found)


def _pairs(hosts: Sequence[int], middle: int) -> tuple[tuple[int, int], ...]:
    return tuple(zip(hosts[:middle], hosts[middle:], strict=False))


def slots_of(cuts: Sequence[Cut]) -> Slots:
    slots: Slots = [{} for _ in range(max(cut.together for cut in cuts) + 1)]
    for cut in cuts:
        for number, (one, two) in enumerate(cut.pairs):
            turns = [cut.together]
            if number < cut.alone:
                turns.append(cut.first + number)
            for turn in turns:
                slots[turn] |= {one: two, two: one}
    return slots


def halves(
    cuts: Sequence[Cut], names: Sequence[str], results: Mapping[str, CheckResult]
) -> list[HalvesView]:
    """Of each pair the second host reports, once for each of its slots."""
    slots = slots_of(cuts)
    measured: dict[tuple[int, int], Pair] = {}
    for host, name in enumerate(names):
        turns = [turn for turn, slot in enumerate(slots) if slot.get(host, host) < host]
        result = results.get(name)
        for turn, pair in zip(turns, result.pairs if result is not None else (), strict=False):
            if pair.peer == names[slots[turn][host]]:  # an older agent meets others
                measured[turn, host] = pair
    return [_half(cut, names, measured) for cut in cuts]


def _half(cut: Cut, names: Sequence[str], measured: Mapping[tuple[int, int], Pair]) -> HalvesView:
    asked = [(cut.first + number, two) for number, (_, two) in enumerate(cut.pairs[: cut.alone])]
    alone = [measured.get(one) for one in asked]
    together = [measured.get((cut.together, two)) for _, two in cut.pairs]
    view = HalvesView(
        name=cut.name,
        one=[names[one] for one, _ in cut.pairs],
        other=[names[two] for _, two in cut.pairs],
    )
    missing = [pair for pair in (*alone, *together) if pair is None or pair.fault]
    if missing:
        why = next((pair.fault for pair in missing if pair is not None), "a node did not answer")
        view.problem = f"{plural(len(missing), 'measurement')} failed: {why}"
        return view
    there, back = (
        [[rate(pair) for pair in pairs if pair] for pairs in (together, alone)]
        for rate in (_there, _back)
    )
    ways = [
        (sum(at_once), sum(one_by_one) * len(at_once) // len(one_by_one))
        for at_once, one_by_one in (there, back)
    ]
    view.mbs, view.plan_mbs = min(ways, key=lambda way: 1000 * way[0] // max(1, way[1]))
    return view


def _there(pair: Pair) -> int:
    return pair.mbs


def _back(pair: Pair) -> int:
    return pair.back_mbs


def halves_text(view: HalvesView) -> str:
    """How far below the plan it is."""
    where = "all nodes" if view.name == OVER_ALL else view.name
    if view.problem:
        return f"{where}: {view.problem}"
    below = 100 - 100 * view.mbs // max(1, view.plan_mbs)
    pairs = f"{plural(len(view.one), 'pair')} across the middle of {where}"
    plan = f"{rate_text(view.plan_mbs)}, what they carry one at a time"
    if below <= 0:
        return f"{pairs} carry {rate_text(view.mbs)} at the same moment, no less than {plan}"
    return f"{pairs} carry {rate_text(view.mbs)} at the same moment, {below} % below {plan}"
