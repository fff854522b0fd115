"""What regions need alone and together, on days that can be worked out by hand."""

from __future__ import annotations

import random

from bench.regions import TARGET, Found, Need, compare, in_flight, needed, shifted


def test_a_day_that_is_shifted_begins_with_its_end() -> None:
    day = [float(window) for window in range(144)]
    assert shifted(day, 0) == day
    assert shifted(day, 8)[:2] == [96.0, 97.0]
    assert sorted(shifted(day, 16)) == day


def test_even_work_needs_as_many_replicas_as_fit_it() -> None:
    assert needed([10 * TARGET] * 500) == Need(10.0, 10, 10.0)


def test_days_that_do_not_meet_need_a_third_together() -> None:
    day = [1.0] * 48 + [0.0] * 96  # each region works for 8 of 24 hours
    found = compare(day, 400, 0)
    alone = sum(one.most for one in found.regions)
    assert found.together.most < 0.4 * alone
    saved = Found([Need(8.0, 10, 4.0)] * 2, Need(12.0, 15, 8.0)).rows("m")
    assert [row[-1] for row in saved] == ["25.0 %", "25.0 %", "0.0 %"]


def test_the_mean_in_flight_is_as_asked() -> None:

    work = in_flight([1.0, 3.0] * 50, 200, random.Random(1))
    assert 198 < sum(work) / len(work) < 202
