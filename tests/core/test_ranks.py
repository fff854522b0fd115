"""Ranks order jobs as they say, and what is learned of run times can be relied upon."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.scheduling.estimates import (
    ENDED_MAX,
    GROUPS_MAX,
    OCTAVES,
    ONE,
    PATIENCE_FACTOR,
    PATIENCE_MS_MIN,
    SWEEP_GAP_MS,
    SWEEP_JOBS_MAX,
    Estimates,
    Group,
    Patience,
    Sweeps,
    begin_ms,
    octave,
)
from shoal.core.scheduling.ranks import (
    TIRESIAS_GPU_MS,
    Facts,
    Rank,
    fifo,
    learned,
    level,
    srsf,
    srtf,
    tiresias,
)
from shoal.model.job import TIME_MS_MAX

SECOND = 1000
DAY = 24 * 3600 * SECOND
RANKS = [fifo, srtf, srsf, tiresias, learned]

durations = st.integers(min_value=1, max_value=TIME_MS_MAX)
keys = st.lists(st.sampled_from(["a", "b", "c"]), max_size=3).map(tuple)


def facts(number: int, gpus: int = 1, **fields: Any) -> Facts:
    return Facts(number=number, gpus=gpus, **fields)


def order(rank: Rank, *jobs: Facts) -> list[int]:
    return [job.number for job in sorted(jobs, key=rank)]


@pytest.mark.parametrize("rank", RANKS)
def test_priority_comes_before_everything_else(rank: Rank) -> None:
    humble = facts(1, remaining_ms=1, elder=True, running=True)
    proud = facts(2, gpus=64, priority=1, remaining_ms=DAY, attained_gpu_ms=DAY, submitted_ms=9)
    assert order(rank, humble, proud) == [2, 1]


@pytest.mark.parametrize("rank", RANKS)
def test_jobs_that_are_alike_keep_the_order_of_submission(rank: Rank) -> None:
    assert order(rank, facts(3), facts(1), facts(2)) == [1, 2, 3]


def test_fifo_goes_by_submission() -> None:
    assert order(fifo, facts(1, submitted_ms=20), facts(2, submitted_ms=10)) == [2, 1]


def test_srtf_looks_at_time_and_srsf_at_time_and_gpus() -> None:
    wide, long = facts(1, gpus=8, remaining_ms=10), facts(2, gpus=1, remaining_ms=30)
    assert order(srtf, wide, long) == [1, 2]
    assert order(srsf, wide, long) == [2, 1]


@pytest.mark.parametrize("rank", [srtf, srsf, learned])
def test_a_job_of_which_nothing_is_known_comes_last(rank: Rank) -> None:
    assert order(rank, facts(1), facts(2, gpus=64, remaining_ms=TIME_MS_MAX)) == [2, 1]


def test_tiresias_demotes_at_its_thresholds_and_keeps_places_inside_a_level() -> None:
    first, second = TIRESIAS_GPU_MS
    assert [level(ms) for ms in (0, first - 1, first, second - 1, second)] == [0, 0, 1, 1, 2]
    young, middle = facts(3, place=9, attained_gpu_ms=first - 1), facts(2, attained_gpu_ms=first)
    assert order(tiresias, middle, young, facts(1, attained_gpu_ms=second)) == [3, 2, 1]
    assert order(tiresias, facts(1, place=2), facts(2, place=1)) == [2, 1]


def test_a_running_job_gives_way_only_to_one_much_nearer_its_end() -> None:
    running = facts(1, remaining_ms=4096, running=True)
    assert order(learned, running, facts(2, remaining_ms=1024)) == [1, 2]
    assert order(learned, running, facts(2, remaining_ms=1023)) == [2, 1]


def test_the_elder_comes_first_whatever_it_wants() -> None:
    elder = facts(1, gpus=64, remaining_ms=TIME_MS_MAX, elder=True)
    assert order(learned, facts(2, remaining_ms=1, running=True), elder) == [1, 2]


def test_patience_follows_the_mean_age_between_its_bounds() -> None:
    patience = Patience()
    assert patience.ms == PATIENCE_MS_MIN
    patience.observe(10 * DAY)
    patience.observe(20 * DAY)
    assert patience.ms == 15 * DAY * PATIENCE_FACTOR
    for _ in range(10_000):
        patience.observe(TIME_MS_MAX)
    assert patience.ms == TIME_MS_MAX
    assert patience.ages_ms < 1025 * TIME_MS_MAX, "what it remembers is bounded"


def test_sweeps_end_with_a_pause_or_when_they_are_full() -> None:
    sweeps = Sweeps()
    together = [sweeps.join(("8",), index) for index in range(SWEEP_JOBS_MAX)]
    assert set(together) == {("8", "sweep 0")}
    assert sweeps.join(("8",), SWEEP_JOBS_MAX) == ("8", "sweep 1")
    assert sweeps.join(("8",), SWEEP_JOBS_MAX + SWEEP_GAP_MS) == ("8", "sweep 1")
    assert sweeps.join(("8",), SWEEP_JOBS_MAX + 2 * SWEEP_GAP_MS + 1) == ("8", "sweep 2")
    assert sweeps.join(("4",), 0) == ("4", "sweep 0")


@given(durations)
def test_an_octave_holds_what_is_put_into_it(duration_ms: int) -> None:
    at = octave(duration_ms)
    assert begin_ms(at) <= duration_ms
    assert duration_ms < begin_ms(at + 1) or at == OCTAVES - 1


@given(st.lists(st.tuples(keys, durations), max_size=30), keys)
def test_chances_are_chances_and_never_none(told: list[tuple[Any, int]], key: Any) -> None:
    estimates = Estimates()
    for where, duration_ms in told:
        estimates.observe(where, duration_ms)
    assert all(0 < chance <= ONE for chance in estimates.chances(key))


@given(st.lists(st.tuples(keys, durations), max_size=30), keys, durations)
def test_quantiles_grow_with_the_share_and_respect_what_was_attained(
    told: list[tuple[Any, int]], key: Any, attained_ms: int
) -> None:
    estimates = Estimates()
    for where, duration_ms in told:
        estimates.observe(where, duration_ms)
    found = [estimates.quantile(key, percent, attained_ms) for percent in (1, 10, 50, 90, 99)]
    assert found == sorted(found)
    assert found[0] >= attained_ms
    assert estimates.quantile(key, 50, 10 * TIME_MS_MAX) >= 10 * TIME_MS_MAX
    assert estimates.remaining_ms(key, attained_ms) >= 1


@given(st.lists(st.tuples(keys, durations), max_size=30), keys, durations)
def test_a_restored_learner_answers_the_same(
    told: list[tuple[Any, int]], key: Any, attained_ms: int
) -> None:
    before = Estimates()
    for where, duration_ms in told:
        before.observe(where, duration_ms)
        before.remaining_ms(key, attained_ms)  # what is cached must not matter
    stored = msgspec.json.encode(before.groups)
    after = Estimates(msgspec.json.decode(stored, type=dict[str, Group]))
    assert after.remaining_ms(key, attained_ms) == before.remaining_ms(key, attained_ms)
    assert after.quantile(key, 50, attained_ms) == before.quantile(key, 50, attained_ms)


def test_half_of_many_like_jobs_end_within_the_octave_of_their_median() -> None:
    estimates = Estimates()
    for _ in range(200):
        estimates.observe(("8", "train"), 3600 * SECOND)
    median_ms = estimates.quantile(("8", "train"), 50)
    assert octave(median_ms) == octave(3600 * SECOND)


def test_a_group_with_little_history_says_what_its_enclosing_group_says() -> None:
    estimates = Estimates()
    for _ in range(200):
        estimates.observe(("8", "long"), 10 * DAY)
        estimates.observe(("1", "short"), 10 * SECOND)
    assert estimates.quantile(("8", "new"), 50) > DAY
    assert estimates.quantile(("1", "new"), 50) < 60 * SECOND


def test_jobs_that_go_on_count_as_much_as_jobs_that_ended() -> None:
    """Ten ended early and ninety still run: who counts ends alone would say that all are short."""
    estimates = Estimates()
    key = ("8",)
    for _ in range(10):
        estimates.observe(key, 10 * SECOND)
    for _ in range(90):
        estimates.began(key)
        estimates.survived(key, 0, DAY)
    assert estimates.quantile(key, 50) > DAY


def test_siblings_that_run_on_make_a_fresh_job_less_urgent_and_their_ends_more() -> None:
    estimates = Estimates()
    for _ in range(50):
        estimates.observe(("8",), 60 * SECOND)
        estimates.observe(("8",), 3 * DAY)
    unknown_ms = estimates.remaining_ms(("8", "none yet"), 0)
    for _ in range(4):
        estimates.began(("8", "slow"))
        estimates.survived(("8", "slow"), 0, DAY)
        estimates.observe(("8", "quick"), 60 * SECOND)
    assert estimates.remaining_ms(("8", "slow"), 0) > 4 * unknown_ms
    assert estimates.remaining_ms(("8", "quick"), 0) < unknown_ms


def test_memory_is_bounded_in_groups_and_counts() -> None:
    estimates = Estimates()
    for number in range(GROUPS_MAX + 100):
        estimates.observe((str(number),), SECOND)
    assert len(estimates.groups) == GROUPS_MAX
    assert "" in estimates.groups, "the group of all jobs is told of most often"
    for _ in range(3 * ENDED_MAX):
        estimates.observe((), SECOND)
    assert sum(estimates.groups[""].ended) <= ENDED_MAX
