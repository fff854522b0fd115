"""Halves against halves: who measures when, and what a cut is said to carry."""

from __future__ import annotations

import pytest

from shoal.core.features.fabric.halves import OVER_ALL, cuts_of, halves, halves_text, slots_of
from shoal.core.features.fabric.tours import LEAD_MS
from shoal.model.commands import Check
from shoal.model.fabric import Pair
from shoal.model.health import CheckResult, Standing
from shoal.model.report import Accepted, CheckNetwork, Refused
from tests.core.test_fabric import cluster


@pytest.mark.parametrize(
    "racks", [[4], [2, 2], [4, 4], [5, 4, 1], [3, 8, 6, 4], [40, 40, 40], [1] * 9]
)
def test_all_pairs_across_each_cut_meet_at_once_and_some_of_them_alone(racks: list[int]) -> None:
    places = [f"r{rack}" for rack, size in enumerate(racks) for _ in range(size)]
    cuts = cuts_of(places)
    slots = slots_of(cuts)
    assert cuts[-1].name == OVER_ALL
    assert [cut.name for cut in cuts[:-1]] == [
        f"r{rack}" for rack, size in enumerate(racks) if size >= 4 and len(racks) > 1
    ]
    for cut in cuts:
        inside = [pair for pair in cut.pairs if all(places[host] == cut.name for host in pair)]
        assert cut.name == OVER_ALL or len(inside) == len(cut.pairs)
        assert max(one for one, _ in cut.pairs) < min(two for _, two in cut.pairs), "two halves"
        assert all(slots[cut.together][one] == two for one, two in cut.pairs)
        for number, pair in enumerate(cut.pairs[: cut.alone]):
            others = {host for host in slots[cut.first + number] if places[host] == cut.name}
            assert cut.name == OVER_ALL or others == set(pair), "no other pair of the rack"
            if cut.name == OVER_ALL:
                assert slots[cut.first + number].keys() == set(pair)
    for slot in slots:
        assert all(slot[other] == host for host, other in slot.items())


def test_the_plan_is_what_pairs_carry_alone_and_the_worse_direction_counts() -> None:
    names = list("abcdefghij")
    cuts = cuts_of([""] * 10)
    slots = slots_of(cuts)

    def result(host: int, faults: bool = False) -> CheckResult:
        found = []
        for turn, slot in enumerate(slots):
            if slot.get(host, host) < host:
                rates = (40, 90) if turn == cuts[0].together else (100, 100)
                fault = "no route" if faults else ""
                found.append(Pair(names[slot[host]], 0, *rates, fault))
        return CheckResult(id="h1", pairs=tuple(found))

    results = {name: result(host) for host, name in enumerate(names)}
    (view,) = halves(cuts, names, results)
    assert (view.one, view.other) == (list("abcde"), list("fghij"))
    assert (view.mbs, view.plan_mbs) == (200, 500)
    words = "200 MB/s at the same moment, 60 % below 500 MB/s, what they carry one at a time"
    assert halves_text(view) == f"5 pairs across the middle of all nodes carry {words}"
    (view,) = halves(cuts, names, {**results, "j": result(9, faults=True)})
    assert "1 measurement failed: no route" in halves_text(view)
    (view,) = halves(cuts, names, {**results, "f": CheckResult(id="h1", pairs=(Pair("b", 1, 9),))})
    assert "a node did not answer" in view.problem, "an agent that does not know halves"


def test_a_check_of_halves_tells_each_node_whom_it_meets_and_judges_nobody() -> None:
    made = cluster("a", "b", "c")
    assert isinstance(made.ask(CheckNetwork(halves=True)), Refused)
    made.join("d", gpus=1)
    assert isinstance(made.ask(CheckNetwork(halves=True, collectives=True)), Refused)
    answer = made.ask(CheckNetwork(halves=True))
    assert isinstance(answer, Accepted)
    asked = {one.node: one.tour for one in made.last.commands if isinstance(one, Check)}
    slots = {name: tour.slots for name, tour in asked.items() if tour is not None}
    assert slots == {"a": (2, -1, 2), "b": (-1, 3, 3), "c": (0, -1, 0), "d": (-1, 1, 1)}
    assert {tour.at_ms for tour in asked.values() if tour} == {made.now_ms + LEAD_MS}
    for name in "abcd":
        pairs = (Pair({"c": "a", "d": "b"}.get(name, "a"), 0, 1, 1),) * 2
        made.books[name].measured(CheckResult(id=answer.id, pairs=pairs))
    made.hear(*"abcd")
    assert made.state.heard.tours[answer.id].ended_ms is not None
    assert not made.state.fabric.id
    assert {node.record.standing for node in made.state.order} == {Standing.OK}


def test_a_check_of_halves_ends_without_a_node_that_dies_meanwhile() -> None:
    made = cluster(*"abcd")
    answer = made.ask(CheckNetwork(halves=True))
    assert isinstance(answer, Accepted)
    made.learn_gone("d")
    del made.books["d"]
    for name in "abc":
        pairs = (Pair("a", 0, 1, 1),) * 2 if name == "c" else ()
        made.books[name].measured(CheckResult(id=answer.id, pairs=pairs))
    made.hear(*"abc")
    tour = made.state.heard.tours[answer.id]
    assert tour.ended_ms is not None
    (view,) = halves(tour.cuts, [host.node for host in tour.hosts], tour.results)
    assert view.problem == "2 measurements failed: a node did not answer"
