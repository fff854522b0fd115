"""How fast a node takes and gives bytes."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.agent.blocks.pace import BURST_S, Pace, after

MEGA = 1_000_000


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s


@given(st.lists(st.tuples(st.integers(1, 8 * MEGA), st.floats(0, 5)), min_size=1, max_size=50))
def test_no_more_than_the_rate_and_one_burst(moves: list[tuple[int, float]]) -> None:
    """Whatever is taken, with whatever pauses between."""
    clock, total = Clock(), 0
    pace = Pace(lambda: clock.now_s, clock.sleep)
    pace.bytes_s = MEGA
    began_s = clock.now_s
    for size, pause_s in moves:
        clock.now_s += pause_s
        pace.take(size)
        total += size
        assert total <= MEGA * (clock.now_s - began_s + BURST_S) + 1


def test_a_busy_node_gets_all_of_its_rate() -> None:
    clock = Clock()
    pace = Pace(lambda: clock.now_s, clock.sleep)
    pace.bytes_s = MEGA
    for _ in range(40):
        pace.take(MEGA // 4)
    assert clock.now_s - 50.0 == pytest.approx(10.0 - BURST_S)
    assert after(0.0, 100.0, MEGA, MEGA) == 100.0, "what was not used for long is lost"


def test_threads_share_one_rate() -> None:
    waits: list[float] = []
    pace = Pace(lambda: 100.0, waits.append)
    pace.bytes_s = MEGA
    threads = [threading.Thread(target=pace.take, args=(2 * MEGA,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == [1.0, 3.0, 5.0, 7.0]


def test_without_a_bound_nobody_waits() -> None:
    Pace(lambda: 0.0, lambda _: pytest.fail("it sleeps")).take(1 << 40)
