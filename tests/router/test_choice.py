"""Where a request costs least, and who is let in."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.router.adapters import HOLD_S, Adapters
from shoal.router.admission import Pace, Queue, Waiter, has_room, priority_of, retry_after_s
from shoal.router.choice import NEW_MIN, Candidate, choose, cost

SIZES = st.integers(0, 100_000)
BATCHES = st.integers(0, 200)


@settings(deadline=None)
@given(st.integers(1, 50_000), st.lists(BATCHES, min_size=1, max_size=16))
def test_where_nothing_is_shared_it_is_least_loaded(new: int, batches: list[int]) -> None:
    offers = [Candidate(str(n), new, batch=batch) for n, batch in enumerate(batches)]
    assert choose(offers).batch == min(batches)


@settings(deadline=None)
@given(SIZES, SIZES, BATCHES)
def test_of_equal_batches_the_one_with_more_of_the_prompt(one: int, other: int, batch: int) -> None:
    best = choose([Candidate("a", one, batch=batch), Candidate("b", other, batch=batch)])
    assert max(NEW_MIN, best.new) == max(NEW_MIN, min(one, other))


@settings(deadline=None)
@given(SIZES, BATCHES, st.integers(1, 1_000), st.floats(0.7, 1.4))
def test_cost_grows_with_everything_that_takes_time(
    new: int, batch: int, more: int, noise: float
) -> None:
    base = Candidate("a", new, batch=batch)
    assert cost(base._replace(pending=more), 0) > cost(base, 0)
    assert cost(base._replace(batch=batch + 1), 0) > cost(base, 0)
    assert cost(base._replace(failures=1), 0) > cost(base, 0)
    assert cost(base._replace(extra=more), 0) > cost(base, 0)
    assert cost(base._replace(speed=100.0), 1_000.0) > cost(base, 1_000.0)
    assert cost(base._replace(speed=1_000 * noise), 1_000.0) == cost(base, 1_000.0)


def test_equals_take_turns() -> None:
    turns = {"a": 0, "b": 0, "c": 0}
    order = []
    for place in range(1, 10):
        best = choose([Candidate(name, 500, turn=turn) for name, turn in turns.items()])
        turns[best.id] = place
        order.append(best.id)
    assert sorted(order[:3]) == ["a", "b", "c"] and order == order[:3] * 3


@settings(deadline=None)
@given(st.integers(256, 30_000), st.integers(2, 16))
def test_a_hot_beginning_spreads_and_a_session_stays(prefix: int, replicas: int) -> None:
    """200 requests at once share a beginning that one replica has; none of them ends."""
    batch = dict.fromkeys(range(replicas), 0)
    has = {0}
    for _ in range(200):
        offers = [
            Candidate(str(n), NEW_MIN if n in has else prefix + NEW_MIN, batch=batch[n])
            for n in range(replicas)
        ]
        best = int(choose(offers).id)
        if batch == dict.fromkeys(range(replicas), 0):
            assert best == 0
        batch[best] += 1
        has.add(best)
    most = (prefix + NEW_MIN) // NEW_MIN + 1
    assert max(batch.values()) <= max(most, 200 // replicas + 1)
    if most < 200 // replicas:
        assert len(has) == replicas
        assert max(batch.values()) - min(batch.values()) <= most


# -- admission

ARRIVALS = st.lists(
    st.tuples(st.integers(-5, 5), st.floats(0, 100), st.floats(0, 100)), max_size=60
)


@settings(deadline=None)
@given(ARRIVALS, st.integers(1, 20), st.integers(0, 30), st.floats(0, 120))
def test_the_queue_is_bounded_ordered_and_loses_nobody(
    arrivals: list[tuple[int, float, float]], most: int, room: int, now: float
) -> None:
    refused: list[int] = []
    entered: list[int] = []

    def admit(item: int) -> bool:
        if len(entered) < room:
            entered.append(item)
            return True
        return False

    queue: Queue[int] = Queue(admit, lambda item, why: refused.append(item))
    waiters: dict[int, Waiter[int]] = {}
    for item, (priority, due, until) in enumerate(arrivals):
        waiter = queue.add(item, priority, due, until, most)
        if waiter is None:
            refused.append(item)
        else:
            waiters[item] = waiter
        assert len(queue) <= most
    displaced = set(refused)
    standing = [item for item in waiters if item not in displaced]
    if displaced and standing:
        worst = min(arrivals[item][0] for item in standing)
        assert all(arrivals[item][0] <= worst for item in displaced)
    queue.expire(now)
    late = {item for item in standing if arrivals[item][2] <= now}
    assert set(refused) == displaced | late
    queue.pump()
    ranks = [waiters[item].rank for item in entered]
    assert ranks == sorted(ranks)
    left = len(standing) - len(late) - len(entered)
    assert len(queue) == left and (not left or len(entered) == room)
    assert sorted(entered + refused) == sorted({*entered, *refused})


def test_who_cannot_be_in_time_lets_the_others_pass() -> None:
    entered: list[str] = []
    queue: Queue[str] = Queue(lambda item: not entered.append(item), lambda item, why: None)  # type: ignore[func-returns-value]
    queue.add("late", 0, 1.0, 99.0, 10)
    queue.add("in time", 0, 5.0, 99.0, 10)
    queue.add("important and late", 1, 1.0, 99.0, 10)
    queue.expire(2.0)
    queue.pump()
    assert entered == ["important and late", "in time", "late"]


@pytest.mark.parametrize(("blocked", "expected"), [(None, ["b", "c"]), (False, [])])
def test_who_waits_for_an_adapter_lets_others_pass_but_nobody_else_does(
    blocked: bool | None, expected: list[str]
) -> None:
    entered: list[str] = []

    def admit(item: str) -> bool | None:
        if item == "a":
            return blocked
        entered.append(item)
        return True

    queue: Queue[str] = Queue(admit, lambda item, why: None)
    for item in "abc":
        queue.add(item, 0, 9.0, 9.0, 10)
    queue.pump()
    assert entered == expected
    assert len(queue) == 3 - len(expected)


def test_priorities_are_clamped_and_must_be_numbers() -> None:
    assert [priority_of(one) for one in ("5", "-5", "9999999", "-9999999")] == [5, -5, 1000, -1000]
    for wrong in ("", "x", "1.5", "1e3"):
        with pytest.raises(ValueError, match="invalid literal"):
            priority_of(wrong)


@settings(deadline=None)
@given(st.floats(0.1, 5.0), st.integers(20, 200), st.integers(5, 60))
def test_places_settle_where_the_pace_is_held(per_request: float, goal: int, load: int) -> None:
    """An engine whose tokens take 10 ms and some more for each request."""
    pace, batch, held = Pace(), 0, []
    for second in range(400):
        batch = min(load, pace.most or load)
        itl = 10 + per_request * batch
        pace.saw(itl, goal, batch, second * 2.0)
        held.append(itl <= goal)
    if 10 + per_request <= goal * 0.8:
        assert sum(held[100:]) > 270  # of 300: it tries again once a minute
        assert batch >= min(load, (goal - 10) / per_request) * 0.5 - 2
    assert pace.most >= 0 and pace.room(0)


def test_an_idle_replica_takes_any_request() -> None:
    assert has_room(0, 0, Pace(), 1e9, 1)
    assert not has_room(1, 0, Pace(), 2.0, 1)
    assert has_room(1, 0, Pace(), 2.0, 0)
    assert not has_room(4, 4, Pace(), 0.0, 0)
    assert (retry_after_s(0, 0.0), retry_after_s(100, 10.0), retry_after_s(1, 9.0)) == (60, 10, 1)


# -- adapters


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=80), st.integers(1, 3)
)
def test_adapters_are_bounded_and_one_in_use_stays(
    turns: list[tuple[str, bool]], most: int
) -> None:
    adapters, users, now = Adapters(), list[str](), 0.0
    for name, ends in turns:
        now += 1
        if ends and users:
            adapters.done(users.pop(0), now)
        if adapters.price(name, most, now) is None:
            assert len({*users}) >= most
            continue
        gone = adapters.use(name, most, now)
        assert gone not in users
        users.append(name)
        assert len(adapters.loaded) <= most
        assert {*users} <= adapters.loaded.keys()


def test_one_adapter_more_costs_more_where_another_was_used_just_now() -> None:
    adapters = Adapters()
    free = adapters.price("a", 1, 0.0)
    adapters.use("a", 1, 0.0)
    adapters.done("a", 0.0)
    assert adapters.price("a", 1, 1.0) == 0
    just_now, later = adapters.price("b", 1, 1.0), adapters.price("b", 1, HOLD_S + 1)
    assert free is not None and just_now is not None and later is not None
    assert 0 < free < later < just_now
