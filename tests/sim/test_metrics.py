"""The figures: each as its definition says."""

from __future__ import annotations

import pytest

from shoal.sim.replay.clusters import alike
from shoal.sim.replay.metrics import (
    FIGURES,
    Levels,
    Records,
    Summary,
    best,
    fairness,
    quantile,
    spread,
    time_text,
)
from shoal.sim.replay.traces import Arrival, Gangs


def test_quantiles_are_taken_as_the_published_tables_take_them() -> None:
    ordered = list(range(200))
    assert quantile(ordered, 0.99) == 198
    assert quantile(ordered, 0.5) == 99.5
    assert quantile([1, 5, 9], 0.5) == 5
    assert quantile([7], 0.99) == 7
    assert quantile([], 0.99) == 0
    assert spread([3000, 1000, 2000]).median_s == 2


def records(*jobs: tuple[str, int, int]) -> Records:
    """Jobs as (tenant, work, time in the system)."""
    spec, result = Gangs(8).spec(1), Records()
    for tenant, work_ms, time_ms in jobs:
        result.add(
            Arrival(0, work_ms, spec, tenant=tenant),
            placed_ms=0,
            finished_ms=time_ms,
            amount=1000,
            attempts=1,
            succeeded=True,
            predicted=None,
        )
    return result


def test_fairness_is_one_when_all_tenants_are_slowed_down_alike() -> None:
    assert fairness(records(("a", 10, 20), ("b", 100, 200))) == pytest.approx(1)
    assert fairness(records(("a", 10, 10), ("b", 0, 1000))) == pytest.approx(0.5)
    assert fairness(records()) == 1


def test_free_time_is_wanted_only_as_far_as_somebody_waits_for_it() -> None:
    levels = Levels(alike(1, gpus=8))
    levels.held, levels.waiting, levels.live = 3000, 2000, 2
    levels.advance(10)
    levels.waiting = 16_000
    levels.advance(20)
    levels.held, levels.waiting, levels.live = 0, 0, 0
    levels.advance(30)
    sums = levels.sums
    assert sums["held"] == 3000 * 20
    assert sums["wanted"] == 2000 * 10 + 5000 * 10
    assert sums["idle"] == 3000 * 10 + 8000 * 10
    assert sums["up_with_work"] == 8000 * 20
    assert sums["up_with_queue"] == 8000 * 20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.44, "0.4s"),
        (42, "42s"),
        (59.7, "1m 00s"),
        (200, "3m 20s"),
        (7500, "2h 05m"),
        (86_399.9, "1d 0h"),
        (100_000, "1d 3h"),
    ],
)
def test_times_are_told_in_two_units(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def summary(policy: str, mean_s: float) -> Summary:
    times = spread([int(mean_s * 1000)])
    return Summary(
        policy=policy,
        jobs=1,
        failed=0,
        wait=times,
        completion=times,
        makespan_s=1,
        utilization=0.5,
        utilization_with_work=0.5,
        fragmentation=0,
        goodput=1,
        preemptions=0,
        requeues_by_failure=0,
        failures=0,
        fairness=1,
        predictions_right=None,
        prediction_error_s=None,
        gpu_hours=1,
        accounts=[],
        currency="",
        cost=None,
        notes=[],
        events=1,
        steps=1,
        step_mean_ms=1,
        step_p99_ms=1,
    )


def test_the_best_are_marked_where_there_is_a_difference_to_see() -> None:
    wait = next(figure for figure in FIGURES if figure.title == "wait, mean")
    jobs = next(figure for figure in FIGURES if figure.title == "jobs")
    error = next(figure for figure in FIGURES if figure.title == "prediction error")
    rows = [summary("a", 100), summary("b", 50), summary("c", 50.1)]
    assert best(wait, rows) == {1, 2}
    assert best(wait, rows[1:]) == set()
    assert best(jobs, rows) == set()
    assert best(error, rows) == set()
