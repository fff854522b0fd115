"""The other way round: the smallest cluster for a deadline, the fastest for a budget."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from shoal.plan.hardware import Impossible
from shoal.plan.report import Ask, Point, point
from shoal.plan.search import count_text, least_nodes, many

BETWEEN = (1.25, 1.5, 1.75)  # sizes between two powers of two
GPUS_MAX = 1 << 18
FASTER = 0.98  # twice as many nodes must take less than this share of the time


class Inverse(msgspec.Struct, frozen=True, kw_only=True):
    """`chosen` meets what was asked for; `tried` are all sizes that were computed."""

    chosen: Point
    tried: list[Point]
    limit: str  # which of the two decided the size: deadline or budget
    cheaper: Point | None = None  # larger, in time, and yet cheaper: a size with a better layout


def smallest(ask: Ask, deadline_s: float | None, budget: float | None) -> Inverse:
    """With a deadline, the smallest cluster that meets it, and the budget if there is one. With a
    budget alone, the fastest cluster that it pays for."""
    walk = _Walk(ask)
    tried = []
    for one in walk.doubling():
        tried.append(one)
        if deadline_s is not None and one.time_s <= deadline_s:
            break
        if deadline_s is None and budget is not None and (one.money or 0.0) > budget:
            break  # larger clusters are less efficient, so they cost more
    if not tried:
        raise Impossible(f"{ask.model.name} fits on no number of these nodes: choose another GPU")
    if deadline_s is not None:
        return _in_time(walk, _for_deadline(walk, tried, deadline_s), deadline_s, budget)
    assert budget is not None
    return Inverse(chosen=_for_budget(walk, tried, budget), tried=walk.all(), limit="budget")


def _in_time(walk: _Walk, small: Point, deadline_s: float, budget: float | None) -> Inverse:
    """Larger clusters are mostly less efficient; but 128 nodes share a batch better than 112."""
    rest = [one for one in walk.all() if one.time_s <= deadline_s and one.nodes > small.nodes]
    priced = [(one.money, one) for one in rest if one.money is not None]
    if budget is not None and small.money is not None and small.money > budget:
        paid = [one for money, one in priced if money <= budget]
        if not paid:
            money = min([small.money, *(money for money, _ in priced)])
            raise Impossible(
                f"the smallest cluster that meets the deadline has {many(small.nodes, 'node')}; "
                f"the cheapest that does costs {money:,.0f} {walk.ask.rates.currency}, and the "
                f"budget is {budget:,.0f}: give a later deadline or a larger budget"
            )
        small = min(paid, key=lambda one: one.nodes)
    cheap = min(priced, key=lambda pair: pair[0], default=None)
    less = cheap is not None and small.money is not None and cheap[0] < small.money
    return Inverse(
        chosen=small,
        tried=walk.all(),
        limit="deadline",
        cheaper=cheap[1] if cheap is not None and less else None,
    )


class _Walk:
    """Sizes that were computed, each once."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.points: dict[int, Point | None] = {}

    def at(self, nodes: int) -> Point | None:
        if nodes not in self.points:
            try:
                self.points[nodes] = point(self.ask.on(nodes))
            except Impossible:
                self.points[nodes] = None
        return self.points[nodes]

    def all(self) -> list[Point]:
        return [one for _, one in sorted(self.points.items()) if one is not None]

    def doubling(self) -> Iterator[Point]:
        """From the least that fits, while more nodes still help."""
        ask = self.ask
        nodes = least_nodes(ask.model, ask.cluster, ask.batch, ask.stack, ask.fixed)
        if not nodes:
            return
        nodes = 1 << (nodes - 1).bit_length()
        last: Point | None = None
        while nodes * ask.cluster.node.gpus <= GPUS_MAX:
            found = self.at(nodes)
            if found is None:
                if last is not None:
                    return  # the batch is too small to be shared by more
            elif last is not None and found.time_s > FASTER * last.time_s:
                return
            else:
                last = found
                yield found
            nodes *= 2

    def between(self, low: int) -> list[Point]:
        found = [
            self.at(round(low * part))
            for part in BETWEEN
            if round(low * part) not in (low, 2 * low)
        ]
        return [one for one in found if one is not None]


def _for_deadline(walk: _Walk, tried: list[Point], deadline_s: float) -> Point:
    met = next((one for one in tried if one.time_s <= deadline_s), None)
    if met is None:
        fast = min(tried, key=lambda one: one.time_s)
        raise Impossible(
            f"no number of these nodes meets the deadline: the fastest, {many(fast.nodes, 'node')} "
            f"({many(fast.gpus, 'GPU')}), take {fast.time_s / 86400:.1f} days; give a later "
            "deadline, fewer tokens, a larger batch or a faster GPU"
        )
    smaller = [one for one in walk.between(met.nodes // 2) if one.time_s <= deadline_s]
    return min([met, *smaller], key=lambda one: one.nodes)


def _for_budget(walk: _Walk, tried: list[Point], budget: float) -> Point:
    priced = [(one.money, one) for one in tried if one.money is not None]
    if not priced:
        raise Impossible("a budget needs the price of a GPU: give a price list with --prices")
    paid = [one for money, one in priced if money <= budget]
    if not paid:
        money, cheap = min(priced, key=lambda pair: pair[0])
        tokens = walk.ask.tokens * budget / money
        raise Impossible(
            f"the budget is too small: the cheapest cluster has {many(cheap.nodes, 'node')} and "
            f"costs {money:,.0f} {walk.ask.rates.currency}; the budget pays for about "
            f"{count_text(tokens)} tokens"
        )
    fast = min(paid, key=lambda one: one.time_s)
    more = [
        one for one in walk.between(fast.nodes) if one.money is not None and one.money <= budget
    ]
    return min([fast, *more], key=lambda one: one.time_s)
