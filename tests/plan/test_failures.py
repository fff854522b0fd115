"""Failures, checkpoints and goodput: the formulas against a seeded simulation and Llama 3."""

from __future__ import annotations

import random

import pytest

from shoal.plan import report
from shoal.plan.report import Faults, daly_s, goodput, mean_between_s, shares, young_s


def simulated(interval_s: float, save_s: float, restart_s: float, between_s: float) -> float:
    """The share of work in a run of 4,000 checkpoints, with failures at any time."""
    chance = random.Random(18)
    now = 0.0
    fails_at = chance.expovariate(1 / between_s)
    for _ in range(4000):
        while fails_at < now + interval_s + save_s:
            now, fails_at = fails_at, fails_at + chance.expovariate(1 / between_s)
            while fails_at < now + restart_s:
                now, fails_at = fails_at, fails_at + chance.expovariate(1 / between_s)
            now += restart_s
        now += interval_s + save_s
    return 4000 * interval_s / now


@pytest.mark.parametrize(
    ("save_s", "restart_s", "between_s"),
    [(5, 600, 11_000), (60, 300, 3600), (300, 600, 1800), (10, 1200, 1000)],
)
def test_the_formula_gives_the_goodput_of_a_simulated_run(
    save_s: float, restart_s: float, between_s: float
) -> None:
    interval_s = daly_s(save_s, between_s)
    found = shares(interval_s, save_s, restart_s, between_s)
    assert found.work == pytest.approx(
        simulated(interval_s, save_s, restart_s, between_s), rel=0.06
    )
    assert sum(found) == pytest.approx(1)
    assert min(found) >= 0


@pytest.mark.parametrize(("save_s", "between_s"), [(5, 11_000), (60, 3600), (300, 1800)])
def test_no_other_interval_gives_more_goodput_than_dalys(save_s: float, between_s: float) -> None:
    best = shares(daly_s(save_s, between_s), save_s, 0, between_s).work
    for factor in (0.2, 0.5, 0.8, 0.9, 1.1, 1.25, 2, 5):
        other = shares(factor * daly_s(save_s, between_s), save_s, 0, between_s).work
        assert other <= best * 1.0001
    # The higher order matters where saving is slow.
    young = shares(young_s(save_s, between_s), save_s, 0, between_s).work
    assert young <= best * 1.0001


def test_llama_3_has_the_failures_and_the_goodput_that_were_published() -> None:
    """One interruption every 3.1 hours, and more than 90 % effective training time."""
    assert mean_between_s(16_384) / 3600 == pytest.approx(3.09, abs=0.01)
    size = 405e9 * 14  # weights in 16 bits, and 12 bytes for the optimizer
    found = goodput(16_384, size, Faults(storage_bytes_per_s=2e12))
    assert 0.90 < found.goodput < 0.95
    assert found.failures_per_day == pytest.approx(419 / 54)
    assert 2 < found.save_s < 4


def test_a_cluster_without_failures_loses_nothing_and_one_that_always_fails_does_nothing() -> None:
    calm = goodput(8, 1e12, Faults(per_gpu_hour=0, storage_bytes_per_s=1e9))
    assert calm.goodput == 1
    assert calm.failures_per_day == 0
    assert calm.storage_needed_bytes_per_s == 0
    stormy = goodput(1_000_000_000, 1e15, Faults(storage_bytes_per_s=1e9))
    assert stormy.goodput == 0
    assert stormy.restarting == 1


def test_the_storage_that_is_said_to_be_needed_keeps_the_cost_at_its_share() -> None:
    slow = goodput(16_384, 6e12, Faults(storage_bytes_per_s=1e11))
    assert slow.saving + slow.repeating > report.SAVING_SHARE
    right = goodput(
        16_384, 6e12, Faults(storage_bytes_per_s=slow.storage_needed_bytes_per_s, restart_s=0)
    )
    assert right.saving + right.repeating == pytest.approx(report.SAVING_SHARE, rel=0.05)
