"""Series stay bounded however long a life is, and tell the same as what went into them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.control.history.curve import Curve, Fading, Kept, Merge, Shape

PLAIN = Shape((Merge.LAST, Merge.MEAN), "d")


def test_a_curve_tells_its_points_as_they_came_while_there_is_room() -> None:
    curve = Curve(PLAIN, 8)
    for second in range(1, 6):
        curve.add(second * 1000, (second, second / 2))
    assert list(curve.rows()) == [(s * 1000, [s, s / 2]) for s in range(1, 6)]
    assert curve.width_ms == 1000


def test_a_full_curve_is_told_half_as_finely_and_goes_on() -> None:
    curve = Curve(PLAIN, 8)
    for second in range(1, 9):
        curve.add(second * 1000, (second, second))
    assert [at for at, _ in curve.rows()] == [2000, 4000, 6000, 8000]
    assert [values for _, values in curve.rows()] == [[2, 1.5], [4, 3.5], [6, 5.5], [8, 7.5]]
    assert curve.width_ms == 2000
    assert not curve.due(9000)
    assert curve.due(10_000)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 500), st.integers(32, 64))
def test_no_life_is_too_long_for_a_curve(points: int, most: int) -> None:
    """Width and number of points stay in step, the last point is the newest, means stay means."""
    curve = Curve(PLAIN, most)
    now_ms = 0
    for number in range(1, points + 1):
        now_ms += curve.width_ms
        curve.add(now_ms, (number, 5.0))
    rows = list(curve.rows())
    assert 1 <= len(rows) < max(2, most)
    assert rows[-1][0] == now_ms and rows[-1][1] == [points, 5.0]
    assert [at for at, _ in rows] == sorted({at for at, _ in rows})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9000), max_size=400), st.integers(2, 16), st.integers(1, 6))
def test_what_fades_stays_in_order_and_bounded(gaps: list[int], most: int, levels: int) -> None:
    fading = Fading(PLAIN, most, levels, 1000)
    now_ms = 0
    for gap in gaps:
        now_ms += gap
        fading.add(now_ms, (gap, 1.0))
    rows = list(fading.rows())
    assert len(rows) <= most * levels + 1
    assert [at for at, _ in rows] == sorted(at for at, _ in rows)
    assert all(values[1] == 1.0 for _, values in rows)
    if gaps:
        assert rows[-1][0] == now_ms


def test_the_recent_past_is_finer_than_the_distant_and_a_gap_stays_one() -> None:
    fading = Fading(PLAIN, 4, 8, 1000)
    for second in range(1, 101):
        fading.add(second * 1000, (second, second))
    times = [at for at, _ in fading.rows()]
    steps = [b - a for a, b in pairwise(times)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == 1000
    assert max(steps) >= 8000
    fading.add(10_000_000, (1, 1))
    for second in range(1, 20):
        fading.add(10_000_000 + second * 1000, (second, second))
    times = [at for at, _ in fading.rows()]
    assert 100_000 in times or 99_000 in times or max(t for t in times if t < 200_000) >= 96_000
    assert times[-1] == 10_019_000


def test_missing_values_and_small_kinds_of_numbers() -> None:
    small = Shape((Merge.MEAN, Merge.MOST), "H")
    rows = list(small.rows(small.pack(5, (None, 1e9)) + small.pack(6, (-3, 12.4))))
    assert rows == [(5, [None, 65534]), (6, [0, 12])]
    assert list(small.rows(small.merged(*rows))) == [(6, [0, 65534])]
    floats = Shape((Merge.MEAN,), "f")
    told = floats.pack(1, (float("inf"),)) + floats.pack(2, (1e300,))
    assert [values for _, values in floats.rows(told)] == [[None], [None]]


def test_a_point_that_is_not_newer_is_left_out() -> None:
    curve = Curve(PLAIN, 8)
    for at in (5000, 5000, 4000, 6000):
        curve.add(at, (1, 1))
    assert [at for at, _ in curve.rows()] == [5000, 6000]


@pytest.mark.parametrize("cut", [0, 1, 23, 25])
def test_a_series_that_was_stored_goes_on_and_a_cut_one_loses_its_end(cut: int) -> None:
    curve = Curve(PLAIN, 8)
    for second in range(1, 4):
        curve.add(second * 1000, (second, None))
    kept = curve.kept()
    data = kept.levels[0][: len(kept.levels[0]) - cut]
    again = Curve(PLAIN, 8, Kept(kept.width_ms, [data]))
    assert len(again) == (72 - cut) // 24
    assert list(again.rows()) == list(curve.rows())[: len(again)]
