"""Hangs are found by the job's own pace; pauses, saves and slow starts are none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.books.hang import Hang, Pace, bound_ms, hang, hear, leave, stuck, wake_ms
from shoal.model.health import HealthRule
from shoal.model.progress import Beat

RULE = HealthRule()


def beat(steps: int, **more: int | bool) -> Beat:
    return msgspec.structs.replace(Beat(ref="", step=steps, steps=steps), **more)


def gone(steps: int, step_ms: int, members: int = 4) -> tuple[Pace, int]:
    """A gang that did so many steps of so long, and when the last was done."""
    pace, now = Pace(began_ms=0), 0
    for step in range(1, steps + 1):
        now += step_ms
        for member in range(members):
            hear(pace, member, beat(step), 0, now)
    return pace, now


def told(pace: Pace, now_ms: int, hangs: int = 0) -> Hang:
    found = hang(pace, now_ms, RULE, hangs)
    assert found is not None
    return found


def test_a_gang_that_stops_stepping_hangs_after_the_floor_when_its_steps_are_short() -> None:
    pace, now = gone(100, 200)
    assert hang(pace, now + RULE.hang_floor_ms, RULE) is None
    found = told(pace, now + RULE.hang_floor_ms + 1)
    assert found.bound_ms == RULE.hang_floor_ms
    assert found.step_us == 200_000
    assert found.why == (
        "no step for 1m at step 100 (usually 0.2s a step); one of 4 members is stuck"
    )
    assert wake_ms(pace, RULE) == now + RULE.hang_floor_ms + 1


def test_long_steps_make_the_bound_long() -> None:
    pace, now = gone(100, 30_000)
    assert bound_ms(pace, RULE) == RULE.hang_steps * 30_000
    assert hang(pace, now + 300_000, RULE) is None


def test_the_longest_pause_seen_is_no_hang_when_it_comes_again() -> None:
    pace, now = gone(100, 200)
    now += 55_000  # an evaluation, nearly too long for the floor
    hear(pace, 0, beat(101), 0, now)
    assert bound_ms(pace, RULE) == 110_000
    assert hang(pace, now + 100_000, RULE) is None


def test_a_start_may_take_its_time() -> None:
    pace = Pace(began_ms=1000)
    assert hang(pace, 10**9, RULE) is None  # nobody beats, so nobody is watched
    hear(pace, 0, beat(0), 0, 2000)
    assert hang(pace, 2000 + RULE.hang_patient_ms, RULE) is None
    assert told(pace, 2001 + RULE.hang_patient_ms).step_us == 0


def test_a_member_that_reports_later_than_its_peer_does_not_make_the_gang_seem_fast() -> None:
    """Steps of 10 s: one tells of step 3 late, the other of step 7 a moment after it."""
    pace = Pace(began_ms=0)
    hear(pace, 0, beat(3, compute_us=30_000_000), 0, 70_000)
    hear(pace, 1, beat(7, compute_us=70_000_000), 0, 70_100)
    assert bound_ms(pace, RULE) == RULE.hang_steps * 10_000
    hear(pace, 1, beat(9, compute_us=90_000_000), 0, 90_100)
    assert bound_ms(pace, RULE) == RULE.hang_steps * 10_000


def test_the_first_word_of_a_member_is_a_sign_of_work() -> None:
    """It may tell of a save that is newer than the steps of its peers."""
    pace, now = gone(100, 200, members=2)
    hear(pace, 2, beat(100, saves=1, saved_step=100), 50_000, now + 50_000)
    assert hang(pace, now + 50_000 + RULE.hang_floor_ms, RULE) is None
    assert hang(pace, now + 50_001 + RULE.hang_floor_ms, RULE) is not None


def test_the_first_steps_may_compile() -> None:
    pace, now = gone(RULE.warm_steps - 1, 200)
    assert hang(pace, now + 600_000, RULE) is None
    pace, now = gone(RULE.warm_steps, 200)
    assert hang(pace, now + 600_000, RULE) is not None


def test_a_member_that_says_it_is_busy_is_given_time_and_the_time_is_not_learned() -> None:
    pace, now = gone(100, 200)
    hear(pace, 1, beat(100, busy=True), 300, now + 300)
    assert hang(pace, now + 600_000, RULE) is None
    assert hang(pace, now + 400 + RULE.hang_patient_ms, RULE) is not None
    hear(pace, 1, beat(100), 600_000, now + 600_000)
    assert hang(pace, now + 600_000 + RULE.hang_floor_ms, RULE) is None
    assert told(pace, now + 600_001 + RULE.hang_floor_ms).bound_ms == RULE.hang_floor_ms


@pytest.mark.parametrize("sign", [{"saves": 1}, {"save_us": 5_000_000}, {"saved_step": 100}])
def test_a_save_is_a_sign_of_work(sign: dict[str, int]) -> None:
    pace, now = gone(100, 200)
    hear(pace, 0, beat(100, **sign), 50_000, now + 50_000)
    assert hang(pace, now + 100_000, RULE) is None
    assert bound_ms(pace, RULE) == 100_000  # saves may take that long, so twice of it is waited


def test_after_the_last_step_there_may_be_much_to_wind_up() -> None:
    pace, now = gone(100, 200)
    hear(pace, 0, beat(101, steps_total=101), 0, now + 200)
    assert hang(pace, now + 600_000, RULE) is None


def test_each_earlier_hang_of_a_job_makes_the_next_wait_longer() -> None:
    """If it was an evaluation, it gets through in the end."""
    pace, now = gone(100, 200)
    assert [bound_ms(pace, RULE, hangs) for hangs in (0, 1, 2)] == [60_000, 240_000, 960_000]
    assert hang(pace, now + 200_000, RULE, hangs=1) is None


def test_the_member_behind_is_the_one_that_is_stuck() -> None:
    pace, now = gone(100, 200)
    for member in (0, 1, 3):
        hear(pace, member, beat(101), 0, now + 200)
    assert told(pace, now + 100_000).stuck == (2,)
    assert told(pace, now + 100_000).why.endswith("member 2 is stuck")


def test_of_equals_the_one_that_does_not_wait_for_its_peers_is_stuck() -> None:
    pace, now = gone(100, 200)
    for member in (0, 2, 3):
        hear(pace, member, beat(100, wait_us=9_000_000), 9000, now + 9000)
    hear(pace, 1, beat(100), 9000, now + 9000)
    assert told(pace, now + 100_000).stuck == (1,)


def test_where_nothing_tells_them_apart_all_are_named() -> None:
    pace, _ = gone(100, 200)
    assert stuck(pace) == (0, 1, 2, 3)


def test_a_member_that_left_is_not_waited_for() -> None:
    pace, now = gone(100, 200)
    hear(pace, 3, beat(100, busy=True), 0, now)
    leave(pace, 3)
    leave(pace, 3)
    assert told(pace, now + 100_000).stuck == (0, 1, 2)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 99_000), st.booleans()),
        max_size=60,
    )
)
@settings(max_examples=100, deadline=None)
def test_whatever_is_said_there_is_no_hang_within_the_floor_of_a_step(
    said: list[tuple[int, int, int, bool]],
) -> None:
    pace, now, most = Pace(began_ms=0), 0, dict.fromkeys(range(4), 0)
    for member, steps, pause_ms, busy in said:
        now += pause_ms
        hear(pace, member, beat(steps, busy=busy), 0, now)
        if steps > most[member]:
            assert hang(pace, now + RULE.hang_floor_ms, RULE) is None
        most[member] = steps
        assert pace.busy == sum(mark.busy for mark in pace.members.values())
        assert bound_ms(pace, RULE) >= RULE.hang_floor_ms
    assert len(pace.paces_us) <= 25
    assert msgspec.json.decode(msgspec.json.encode(pace), type=Pace) == pace
