"""Groups and weak links found from measurement, on networks that were wired at random."""

from __future__ import annotations

import random

import msgspec
import pytest

from shoal.core.features.fabric.conclusion import conclude
from shoal.core.features.fabric.groups import places_of
from shoal.core.features.fabric.judging import judge
from shoal.core.features.fabric.links import Table, table_of
from shoal.model.fabric import Fabric, Pair, Weak
from shoal.model.health import CheckResult

SEEDS = range(25)


class Wiring:
    """Blocks of racks of nodes with a rate and a latency for each degree of nearness."""

    def __init__(self, rng: random.Random, sizes: list[list[int]], noise: float = 0.2) -> None:
        self.rng, self.noise = rng, noise
        self.place: dict[str, tuple[int, int]] = {}
        for block, racks in enumerate(sizes):
            for rack, count in enumerate(racks):
                for _ in range(count):
                    self.place[f"n{len(self.place):03}"] = (block, rack)
        self.rates = (1_000, 2_600 if any(len(racks) > 1 for racks in sizes) else 1_000, 10_000)
        self.waits = (60, 40, 20)
        self.slow: dict[str, float] = {}  # nodes
        self.slow_out: dict[str, float] = {}  # nodes, when they send
        self.slow_links: dict[tuple[str, str], float] = {}
        self.late: dict[str, int] = {}
        self.down: dict[str, None] = {}
        self.missing = 0.0

    def depth(self, one: str, two: str) -> int:
        a, b = self.place[one], self.place[two]
        return 2 if a == b else int(a[0] == b[0])

    def rate(self, one: str, two: str) -> int:
        factor = min(self.slow.get(one, 1), self.slow.get(two, 1), self.slow_out.get(one, 1))
        factor *= self.slow_links.get((min(one, two), max(one, two)), 1)
        noise = self.rng.uniform(1 - self.noise, 1 + self.noise)
        return max(1, int(self.rates[self.depth(one, two)] * factor * noise))

    def results(self, names: list[str] | None = None) -> dict[str, CheckResult]:
        names = names or list(self.place)
        found = {}
        for number, name in enumerate(names):
            pairs = []
            for peer in names[:number]:
                # Whoever met nobody of its rack cannot be put there: neighbors always meet.
                neighbors = peer == names[number - 1] and self.depth(name, peer) == 2
                neighbors |= names.index(peer) == number - 2 and self.depth(name, peer) == 2
                if self.rng.random() < self.missing and not neighbors:
                    continue
                if name in self.down or peer in self.down:
                    pairs.append(Pair(peer, fault="no route"))
                    continue
                wait = self.waits[self.depth(name, peer)] * self.rng.uniform(0.8, 1.2)
                wait += self.late.get(name, 0) + self.late.get(peer, 0)
                pairs.append(Pair(peer, int(wait), self.rate(name, peer), self.rate(peer, name)))
            found[name] = CheckResult(id="t1", pairs=tuple(pairs))
        return found

    def table(self, names: list[str] | None = None) -> Table:
        return table_of(names or list(self.place), self.results(names))


def random_sizes(rng: random.Random) -> list[list[int]]:
    """One rack, racks without blocks, or racks in blocks."""
    match rng.randrange(3):
        case 0:
            return [[rng.randrange(4, 20)]]
        case 1:
            return [[rng.randrange(3, 9)] for _ in range(rng.randrange(2, 6))]
        case _:
            return [
                [rng.randrange(3, 7) for _ in range(rng.randrange(2, 4))]
                for _ in range(rng.randrange(2, 4))
            ]


def grouped(places: dict[str, str]) -> dict[str, frozenset[str]]:
    groups: dict[str, set[str]] = {}
    for name, place in places.items():
        groups.setdefault(place, set()).add(name)
    return {name: frozenset(groups[place]) for name, place in places.items()}


def wired(wiring: Wiring) -> dict[str, frozenset[str]]:
    return grouped({name: f"{block}/{rack}" for name, (block, rack) in wiring.place.items()})


def blocks(places: dict[str, str]) -> dict[str, frozenset[str]]:
    return grouped({name: place.split("/")[0] for name, place in places.items()})


@pytest.mark.parametrize("seed", SEEDS)
def test_the_groups_found_are_those_that_were_wired(seed: int) -> None:
    rng = random.Random(seed)
    wiring = Wiring(rng, random_sizes(rng))
    wiring.missing = rng.choice([0.0, 0.05, 0.1])
    names = list(wiring.place)
    if rng.random() < 0.5:
        one, two = sorted(rng.sample(names, 2))
        wiring.slow_links[one, two] = 0.1
    places = places_of(wiring.table())
    assert grouped(places) == wired(wiring)
    assert blocks(places) == grouped({name: str(b) for name, (b, _) in wiring.place.items()})


@pytest.mark.parametrize("seed", SEEDS)
def test_on_a_network_that_is_well_nothing_is_weak(seed: int) -> None:
    rng = random.Random(seed)
    table = Wiring(rng, random_sizes(rng)).table()
    assert judge(table, places_of(table)).weak == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_one_slow_node_is_found_and_nobody_else(seed: int) -> None:
    rng = random.Random(seed)
    wiring = Wiring(rng, random_sizes(rng))
    bad = rng.choice(list(wiring.place))
    how = rng.choice(["slow", "out", "late", "down"])
    match how:
        case "slow":
            wiring.slow[bad] = rng.choice([0.05, 0.2])
        case "out":
            wiring.slow_out[bad] = 0.2
        case "late":
            wiring.late[bad] = 5_000
        case _:
            wiring.down[bad] = None
    table = wiring.table()
    typed = {name: f"{block}/{rack}" for name, (block, rack) in wiring.place.items()}
    places = places_of(table, typed=typed)
    weak = judge(table, places).weak
    assert [(one.node, one.peer) for one in weak] == [(bad, "")]
    if how == "out":
        assert "when it sends" in weak[0].why
    if how != "down":
        assert grouped(places) == wired(wiring)
    others = {name for name in wiring.place if name != bad}
    found, true = grouped(places), wired(wiring)
    assert all(found[name] - {bad} == true[name] - {bad} for name in others)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_slow_link_blames_neither_of_its_nodes(seed: int) -> None:
    rng = random.Random(seed)
    wiring = Wiring(rng, random_sizes(rng))
    one, two = sorted(rng.sample(list(wiring.place), 2))
    wiring.slow_links[one, two] = 0.1
    table = wiring.table()
    weak = judge(table, places_of(table)).weak
    assert [(found.node, found.peer) for found in weak] == [(one, two)]


def test_between_two_nodes_nobody_is_blamed() -> None:
    wiring = Wiring(random.Random(1), [[2]])
    wiring.down["n000"] = None
    table = wiring.table()
    assert [one.peer for one in judge(table, {}).weak] == ["n001"]


def test_a_node_whose_probe_failed_or_whose_agent_is_older_is_not_measured() -> None:
    wiring = Wiring(random.Random(1), [[6]])
    wiring.down["n002"] = wiring.down["n003"] = wiring.down["n004"] = None
    results = wiring.results()
    results["n002"] = CheckResult(id="t1", error="port 7 is in use")
    results["n003"] = CheckResult(id="t1", figures={"cpu_one_mbs": 900})
    del results["n004"]
    table = table_of(list(wiring.place), results)
    assert table.unmeasured == {
        "n002": "port 7 is in use",
        "n003": "its agent is older than tours",
        "n004": "it did not answer",
    }
    assert judge(table, places_of(table)).weak == ()


def test_groups_keep_their_names_when_nodes_come_go_and_move() -> None:
    wiring = Wiring(random.Random(3), [[4, 4], [4, 4]])
    first = places_of(wiring.table())
    wiring.place = {
        **{name: place for name, place in wiring.place.items() if name not in ("n000", "n008")},
        "a00": (0, 0),
        "n001": (1, 1),
    }
    names = sorted(wiring.place)
    second = places_of(table_of(names, wiring.results(names)), first)
    stayed = [name for name in names if name not in ("a00", "n001")]
    assert {name: second[name] for name in stayed} == {name: first[name] for name in stayed}
    assert second["a00"] == first["n002"]
    assert second["n001"] == first["n012"]


def test_a_small_tour_judges_a_node_by_what_is_known_and_leaves_the_groups_alone() -> None:
    wiring = Wiring(random.Random(5), [[4], [4], [1]])
    everybody = sorted(wiring.place)
    typed = {name: str(block) for name, (block, _) in wiring.place.items()}
    known, _ = conclude(wiring.table(everybody), Fabric(), typed, whole=True)
    assert known.weak == ()
    wiring.slow["n008"] = 0.1  # the only node of its group
    few = ["n000", "n001", "n004", "n008"]
    after, _ = conclude(wiring.table(few), known, typed, whole=False)
    assert [one.node for one in after.weak] == ["n008"]
    assert after.places == known.places
    assert after.tiers == known.tiers
    wiring.slow.clear()
    again, _ = conclude(wiring.table(few), after, typed, whole=False)
    assert again.weak == ()


def test_where_everything_is_slow_no_node_is_to_blame() -> None:
    wiring = Wiring(random.Random(5), [[8]])
    known, _ = conclude(wiring.table(), Fabric(), {}, whole=True)
    wiring.slow = dict.fromkeys(wiring.place, 0.1)
    few = sorted(wiring.place)[:4]
    after, _ = conclude(wiring.table(few), known, {}, whole=False)
    assert after.weak == ()


def test_groups_of_equal_bandwidth_are_found_by_their_latency() -> None:
    wiring = Wiring(random.Random(7), [[6], [6]])
    wiring.rates = (10_000, 10_000, 10_000)
    assert grouped(places_of(wiring.table())) == wired(wiring)
    wiring.waits = (30, 30, 20)  # too little to be sure of
    assert len(set(places_of(wiring.table()).values())) == 1


def test_the_groups_of_four_hundred_nodes_are_found() -> None:
    wiring = Wiring(random.Random(9), [[25] * 4] * 4)
    results = wiring.results()
    names = sorted(wiring.place)
    table = table_of(names, results)
    places = places_of(table)
    assert judge(table, places).weak == ()
    assert grouped(places) == wired(wiring)


def test_what_slowed_collectives_down_is_weak_though_pairs_are_well() -> None:
    wiring = Wiring(random.Random(11), [[4]])
    results = wiring.results()
    slow = Weak(node="n002", mbs=10, usual_mbs=90, why="all-reduce is 9 times slower with it")
    stranger = Weak(node="n777", why="is not a part of the tour")
    results["n000"] = msgspec.structs.replace(results["n000"], weak=(slow, stranger))
    table = table_of(sorted(wiring.place), results)
    fabric, judged = conclude(table, Fabric(), {}, whole=True, results=results)
    assert fabric.weak == judged.weak == (slow,)


def test_a_node_whose_group_is_away_keeps_its_place_and_is_not_blamed() -> None:
    made = Wiring(random.Random(0), [[2], [6]], noise=0)
    before, _ = conclude(made.table(), Fabric(), {}, whole=True)
    without = [name for name in made.place if name != "n001"]
    after, judged = conclude(made.table(without), before, {}, whole=True)
    assert after.places == before.places
    assert not judged.weak
    made.slow["n000"] = 0.05
    after, judged = conclude(made.table(), before, {}, whole=True)
    assert [one.node for one in judged.weak] == ["n000"]
    assert after.places == before.places


def test_a_retest_puts_right_the_place_that_a_node_got_while_its_links_were_ill() -> None:
    made = Wiring(random.Random(0), [[3], [3]], noise=0)
    before, _ = conclude(made.table(), Fabric(), {}, whole=True)
    wrong = {**before.places, "n005": before.places["n000"]}
    before = msgspec.structs.replace(before, places=wrong)
    peers = ["n005", "n000", "n001", "n003"]
    after, judged = conclude(made.table(peers), before, {}, whole=False, about="n005")
    assert after.places["n005"] == before.places["n003"]
    assert not judged.weak
    made.slow["n005"] = 0.01
    after, judged = conclude(made.table(peers), before, {}, whole=False, about="n005")
    assert after.places == wrong
    assert [one.node for one in judged.weak] == ["n005"]


def test_among_few_nodes_one_that_falls_ill_keeps_its_group_and_is_found() -> None:
    """Beside a group of one, two of four nodes have no fast link: that alone shows nobody ill."""
    wiring = Wiring(random.Random(3), [[1], [3]], noise=0)
    names = list(wiring.place)
    typed = {name: "a" if name == names[0] else "b" for name in names}
    fabric, _ = conclude(table_of(names, wiring.results()), Fabric(), typed, whole=True)
    wiring.slow[names[2]] = 0.01
    again, judged = conclude(table_of(names, wiring.results()), fabric, typed, whole=True)
    assert again.places == fabric.places
    assert [(one.node, one.peer) for one in judged.weak] == [(names[2], "")]


@pytest.mark.parametrize("ill", [True, False])
def test_a_tour_about_a_node_with_one_peer_clears_it_if_its_link_is_well(ill: bool) -> None:
    wiring = Wiring(random.Random(4), [[3]], noise=0)
    names = list(wiring.place)
    typed = dict.fromkeys(names, "")
    usual, _ = conclude(table_of(names, wiring.results()), Fabric(), typed, whole=True)
    wiring.slow[names[0]] = 0.01
    fabric, _ = conclude(table_of(names, wiring.results()), usual, typed, whole=True)
    assert [one.node for one in fabric.weak] == [names[0]]
    wiring.slow = {names[0]: 0.01} if ill else {}
    two = names[:2]
    table = table_of(two, wiring.results(two))
    again, _ = conclude(table, fabric, typed, whole=False, about=names[0])
    assert (names[0] in [one.node for one in again.weak if not one.peer]) is ill
