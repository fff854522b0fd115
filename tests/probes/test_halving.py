"""Bad hosts and links are found by halving, in few rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from shoal.probes.collective_ranks import Hosts, Located, locate


def measured(
    bad: set[int], pairs: set[tuple[int, int]]
) -> Callable[[tuple[Hosts, ...]], list[bool]]:
    """As a real fabric: a set is slow if it has a bad host, or both ends of a bad link."""

    def measure(groups: tuple[Hosts, ...]) -> list[bool]:
        members = [host for group in groups for host in group]
        assert len(members) == len(set(members)), "a host takes part in one collective at a time"
        assert all(len(group) > 1 for group in groups)
        return [
            bool(set(group) & bad) or any(set(pair) <= set(group) for pair in pairs)
            for group in groups
        ]

    return measure


@pytest.mark.parametrize("size", [4, 5, 7, 8, 13, 64, 1000])
def test_one_bad_host_is_found_in_about_log2_rounds(size: int) -> None:
    for bad in range(size) if size < 100 else random.Random(size).sample(range(size), 40):
        found = locate(range(size), measured({bad}, set()))
        assert (found.nodes, found.pairs, found.between) == ((bad,), (), ())
        assert found.rounds <= math.ceil(math.log2(size)) + 6


@pytest.mark.parametrize("size", [4, 5, 8, 31, 512, 4096])
def test_a_bad_link_between_two_hosts_is_found_and_no_host_is_blamed(size: int) -> None:
    chosen = random.Random(size)
    for _ in range(60):
        one, two = sorted(chosen.sample(range(size), 2))
        found = locate(range(size), measured(set(), {(one, two)}))
        assert (found.nodes, found.pairs, found.between) == ((), ((one, two),), ())
        assert found.rounds <= 2 * math.ceil(math.log2(size)) + 6


def test_two_bad_hosts_among_thousands_are_found_in_the_rounds_of_one() -> None:
    chosen = random.Random(3)
    for _ in range(100):
        bad = set(chosen.sample(range(5000), 2))
        found = locate(range(5000), measured(bad, set()))
        assert found.nodes == tuple(sorted(bad))
        assert not found.pairs
        assert found.rounds <= 13 + 10


def test_a_slow_way_between_two_racks_is_named_as_such() -> None:
    one, other = tuple(range(16)), tuple(range(16, 32))
    pairs = {(a, b) for a in one for b in other}
    assert locate(range(32), measured(set(), pairs)).between == ((one, other),)


def test_slow_only_together_blames_nobody() -> None:
    """A switch that is too small: every part of the whole is fast."""
    found = locate(range(64), lambda groups: [len(group) == 64 for group in groups])
    assert (found.nodes, found.pairs) == ((), ())
    assert len(found.between) == 1


def test_of_two_hosts_the_link_is_to_blame() -> None:
    assert locate((0, 1), measured(set(), {(0, 1)})) == Located(pairs=((0, 1),), rounds=0)


def test_whatever_is_measured_it_ends() -> None:
    chosen = random.Random(1)
    for size in range(2, 80):
        found = locate(range(size), lambda groups: [chosen.random() < 0.5 for _ in groups])
        assert found.rounds <= 4 * size
