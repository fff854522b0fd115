"""Weights follow latency and faults: the pure function, on made-up counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from shoal.gateway.stats import ServerCount
from shoal.gateway.weights import REST_FIRST_MS, Balance, Standing, rebalance
from shoal.model.service import Route, Routing

NAMES = ("a", "b", "c", "d")


class Service:
    """Four replicas whose counters a test moves on."""

    def __init__(
        self, concurrency: int = 8, routing: Routing = Routing.LEAST_LOADED, names: str = "abcd"
    ) -> None:
        self.route = Route(service="s", concurrency=concurrency, routing=routing)
        self.balance = Balance()
        self.now_ms = 0
        self.counts = {name: [0, 0, 0] for name in names}  # begun, answered, failed

    def look(
        self,
        latency: Mapping[str, int],
        in_flight: int = 3,
        answers: int = 50,
        failed: Mapping[str, int] | None = None,
        down: Sequence[str] = (),
        queued: int = 0,
    ) -> dict[str, int]:
        self.now_ms += 1000
        servers, seen = [], {}
        for name, counts in self.counts.items():
            count = answers if name in latency else 0
            counts[0] += count
            counts[1] += count
            counts[2] += (failed or {}).get(name, 0)
            seen[name] = [latency[name]] * count if name in latency else []
            servers.append(
                ServerCount(
                    replica=name,
                    up=name not in down,
                    draining=False,
                    weight=100,
                    in_flight=in_flight,
                    queued=0,
                    begun=counts[0],
                    answered=counts[1],
                    failed=counts[2],
                    response_ms=0,
                )
            )
        base = dict.fromkeys(self.counts, 100)
        self.balance, weights = rebalance(
            self.balance, self.route, servers, base, seen, queued, self.now_ms
        )
        return weights

    def standing(self, name: str) -> Standing:
        return self.balance.tracks[name].standing


def same(value: int, names: Sequence[str] = NAMES) -> dict[str, int]:
    return dict.fromkeys(names, value)


def test_equal_replicas_keep_their_weights_whatever_the_noise() -> None:
    service = Service()
    for _ in range(5):
        assert service.look({"a": 50, "b": 60, "c": 45, "d": 70}) == same(100)
    assert Service().look({"a": 1, "b": 6, "c": 1, "d": 2}) == same(100), "a few milliseconds"


def test_a_replica_five_times_slower_rests_within_two_looks_and_is_tested_in_between() -> None:
    service = Service()
    service.look(same(50))
    slow = same(50) | {"a": 250}
    for _ in range(2):
        weights = service.look(slow)
    assert weights == same(100) | {"a": 0}
    fast = dict.fromkeys("bcd", 50)
    tests = []
    for _ in range(60):
        weights = service.look(fast if weights["a"] == 0 else fast | {"a": 250}, answers=5)
        tests.append(weights["a"])
    assert set(tests) == {0, 1}, "it never gets more than a test"
    assert 3 <= tests.count(1) <= 12, "and those ever more rarely"


def test_a_replica_that_has_become_fast_again_is_taken_back() -> None:
    service = Service()
    for _ in range(3):
        service.look(same(50) | {"a": 250})
    assert service.standing("a") is Standing.RESTING
    for _ in range(REST_FIRST_MS // 1000 + 2):
        weights = service.look(
            same(50) if service.standing("a") is Standing.TESTING else dict.fromkeys("bcd", 50)
        )
    assert weights == same(100)


def test_a_slow_replica_is_needed_when_the_others_are_full() -> None:
    service = Service(concurrency=8)
    for _ in range(4):
        weights = service.look(same(50) | {"a": 250}, in_flight=7)
    assert weights == same(100) | {"a": 20}, "by its speed"
    calm = Service(concurrency=8)
    for _ in range(3):
        calm.look(same(50) | {"a": 250}, in_flight=2)
    assert calm.standing("a") is Standing.RESTING
    for _ in range(10):
        weights = calm.look(dict.fromkeys("bcd", 50), in_flight=8, queued=20)
    assert weights["a"] > 1


def test_without_a_known_limit_nobody_rests_for_being_slow() -> None:
    service = Service(concurrency=0)
    for _ in range(4):
        weights = service.look(same(50) | {"a": 250}, in_flight=1)
    assert weights == same(100) | {"a": 20}


@pytest.mark.parametrize("routing", [Routing.PREFIX, Routing.STICKY])
def test_where_a_hash_decides_speed_changes_nothing(routing: Routing) -> None:
    service = Service(routing=routing)
    for _ in range(4):
        assert service.look(same(50) | {"a": 250}) == same(100)


@pytest.mark.parametrize("routing", list(Routing))
def test_a_replica_whose_answers_fail_rests_and_all_failing_is_not_its_fault(
    routing: Routing,
) -> None:
    service = Service(routing=routing)
    for _ in range(3):
        weights = service.look({"b": 50, "c": 50, "d": 50}, failed={"a": 20})
    assert weights == same(100) | {"a": 0}
    all_fail = Service(routing=routing)
    for _ in range(5):
        assert all_fail.look(same(50), failed=same(50)) == same(100)


def test_a_few_failures_are_forgiven() -> None:
    service = Service()
    assert service.look(same(50), answers=2, failed={"a": 2}) == same(100)


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 1), (3, 1), (4, 1), (6, 2), (9, 3)])
def test_at_most_a_third_of_the_replicas_is_set_aside(count: int, most: int) -> None:
    names = "abcdefghi"[:count]
    service = Service(names=names)
    bad = names[: (count - 1) // 2 + 1] if count > 1 else names
    bad = bad[: max(1, (count - 1) // 2)]
    for _ in range(5):
        weights = service.look(
            {name: 50 for name in names if name not in bad}, failed=dict.fromkeys(bad, 30)
        )
    assert list(weights.values()).count(0) == min(most, len(bad))


def test_a_replica_that_takes_and_never_answers_rests() -> None:
    service = Service()
    service.look(same(50))
    for _ in range(4):
        service.counts["a"][0] += 3
        weights = service.look(dict.fromkeys("bcd", 50))
    assert weights == same(100) | {"a": 0}


def test_what_is_down_does_not_count_as_usual_or_as_left() -> None:
    service = Service(names="abc")
    for _ in range(4):
        weights = service.look({"a": 250, "b": 50}, in_flight=2, down=("c",))
    assert weights["a"] == 0 and weights["b"] == 100
    alone = Service(names="ab")
    for _ in range(4):
        weights = alone.look({"a": 50}, failed={"a": 50}, down=("b",))
    assert weights["a"] == 100, "the last one is never set aside"


def test_counters_that_begin_anew_are_no_failures() -> None:
    service = Service()
    service.look(same(50), failed={"a": 3})
    service.counts = {name: [0, 0, 0] for name in NAMES}
    assert service.look(same(50)) == same(100)
