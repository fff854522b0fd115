"""Durations as people read them, in one place."""

from __future__ import annotations

import pytest

from shoal.model.durations import about, duration_text, span_text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0ms"),
        (999, "999ms"),
        (9_999, "9.9s"),
        (10_000, "10s"),
        (59_999, "59s"),
        (168_000, "2m 48s"),
        (7_200_000, "2h"),
        (187_200_000, "2d 4h"),
    ],
)
def test_a_duration_has_its_two_leading_units(ms: int, text: str) -> None:
    assert duration_text(ms) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "a moment"), (20_000, "20s"), (100_000, "100s"), (168_000, "3m"), (82_800_000, "23h")],
)
def test_what_nobody_knows_exactly_has_one_unit(ms: int, text: str) -> None:
    assert about(ms) == text


@pytest.mark.parametrize(
    ("early_s", "late_s", "text"),
    [
        (0, 1, "any moment"),
        (-60, 1, "any moment"),
        (0, 20, "within 20s"),
        (-5, 100, "within 100s"),
        (30, 61, "in 30s to 61s"),
        (720, 1200, "in 12m to 20m"),
        (600, 600, "in about 10m"),
        (168, 82_800, "in 3m to 23h"),
        (3 * 3600, 9 * 3600, "in 3h to 9h"),
        (3 * 86_400, 5 * 86_400, "in 3d to 5d"),
    ],
)
def test_a_range_names_both_of_its_ends(early_s: int, late_s: int, text: str) -> None:
    assert span_text(early_s * 1000, late_s * 1000) == text
