"""A gang moves when that saves clearly more than it costs, and says the numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.books.moving import Move, consider, remaining_ms
from shoal.model.health import HealthRule

HOUR = 3_600_000


def move(**changes: Any) -> Move:
    given_: dict[str, Any] = {
        "own_us": 1_500_000,
        "gang_us": 1_000_000,
        "step_us": 1_600_000,
        "remaining_ms": 8 * HOUR,
        "restart_ms": 60_000,
        "since_checkpoint_ms": 300_000,
        "width": 32,
        "rule": HealthRule(),
    }
    return consider(**{**given_, **changes})


def test_a_long_run_leaves_a_slow_node() -> None:
    found = move()
    assert found.worth
    assert found.gain == 8 * HOUR * 5 // 16 * 32
    assert found.cost == 360_000 * 32
    assert found.why == (
        "without the slow node a step takes 1.1s instead of 1.6s: 2h 30m of the remaining 8h "
        "saved, against 6m for the restart (5m of it work since the last checkpoint) "
        "x 32 GPUs; worth it"
    )


def test_a_run_that_is_nearly_done_stays() -> None:
    found = move(remaining_ms=600_000)
    assert not found.worth
    assert found.why.endswith("less than 2 times the cost")


def test_nothing_is_gained_where_the_step_hides_the_slowness() -> None:
    assert not move(own_us=1_000_000).worth
    assert not move(step_us=0).worth
    assert not move(remaining_ms=0, restart_ms=0, since_checkpoint_ms=0).worth


@given(
    st.integers(0, 10 * HOUR), st.integers(0, HOUR), st.integers(1, 10**7), st.integers(0, 10**7)
)
def test_more_time_left_or_a_cheaper_restart_never_speak_against_a_move(
    remaining: int, restart: int, step_us: int, own_us: int
) -> None:
    found = move(remaining_ms=remaining, restart_ms=restart, step_us=step_us, own_us=own_us)
    better = move(
        remaining_ms=2 * remaining, restart_ms=restart // 2, step_us=step_us, own_us=own_us
    )
    assert better.worth >= found.worth
    assert 0 <= found.gain <= remaining * 32


def test_the_remaining_time_is_known_by_steps_or_by_others_or_guessed() -> None:
    known = {"step": 100, "step_us": 2_000_000, "ran_ms": 200_000}
    assert remaining_ms(**known, steps_total=400, expected_ms=None) == 600_000
    assert remaining_ms(**known, steps_total=50, expected_ms=None) == 0
    assert remaining_ms(**known, steps_total=0, expected_ms=500_000) == 300_000
    assert remaining_ms(**known, steps_total=0, expected_ms=100_000) == 200_000
    assert remaining_ms(**known, steps_total=0, expected_ms=None) == 200_000
