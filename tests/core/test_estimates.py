"""How long jobs will run, by what jobs like them did, and are doing."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.state.estimates import (
    ENDED_MAX,
    ENOUGH,
    GROUPS_MAX,
    ONE,
    SPANS,
    Estimates,
    Group,
    begin_ms,
    key_of,
    span,
)
from shoal.core.state.expect import left_ms, run_ms
from shoal.core.state.state import State
from shoal.model.job import TIME_MS_MAX, Job, Phase
from shoal.model.policy import Policy
from tests.core.build import Cluster, examples, job_spec

SECOND = 1000
DAY = 24 * 3600 * SECOND

durations = st.integers(0, TIME_MS_MAX)
keys = st.lists(st.sampled_from(("a", "b")), max_size=3).map(tuple)


def job(**fields: object) -> Job:
    return Job(id="j1", number=1, spec=job_spec(**fields))


def taught(ran_ms: int, times: int = ENOUGH, **fields: object) -> Estimates:
    estimates = Estimates()
    for _ in range(times):
        estimates.observe(key_of(job(**fields)), ran_ms)
    return estimates


@examples
@given(ran_ms=st.integers(4_096, TIME_MS_MAX // 2), percent=st.integers(10, 90))
def test_of_many_that_ran_alike_an_expectation_is_off_by_a_quarter_at_most(
    ran_ms: int, percent: int
) -> None:
    expected = taught(ran_ms, 300, name="alike").expect(job(name="alike"), percent, 0)
    assert expected is not None
    assert begin_ms(span(ran_ms)) <= expected <= begin_ms(span(ran_ms) + 1)
    assert begin_ms(span(ran_ms) + 1) <= begin_ms(span(ran_ms)) * 5 // 4 + 1


def test_nobody_knows_before_enough_jobs_have_ended() -> None:
    assert taught(1_000, ENOUGH - 1).expect(job(), 50, 0) is None


def test_a_group_that_knows_too_little_leaves_it_to_a_coarser_one() -> None:
    estimates = taught(10_000, 40, tenant="a", name="train", gpus=8)
    for _ in range(ENOUGH):
        estimates.observe(key_of(job(tenant="b", name="test-7", gpus=8)), 10_000_000)
    assert estimates.key_for(job(tenant="a", name="train", gpus=8)) == ("1x8", "a", "train")
    assert estimates.key_for(job(tenant="b", name="test-8", gpus=8)) == ("1x8", "b", "test-")
    assert estimates.key_for(job(tenant="b", name="other", gpus=8)) == ("1x8", "b")
    assert estimates.key_for(job(tenant="c", gpus=8)) == ("1x8",)
    known = estimates.expect(job(tenant="a", name="train", gpus=8), 50, 0)
    other = estimates.expect(job(tenant="b", name="test-9", gpus=8), 50, 0)
    assert known is not None
    assert other is not None
    assert known < 20_000 < 5_000_000 < other


def test_what_is_recent_weighs_more() -> None:
    estimates = taught(10_000, 3 * ENDED_MAX)
    for _ in range(2 * ENDED_MAX):
        estimates.observe(key_of(job()), 600_000)
    expected = estimates.expect(job(), 50, 0)
    assert expected is not None
    assert expected >= 500_000


def test_the_user_knows_better_and_a_time_limit_is_the_most() -> None:
    state = State()
    state.estimates = taught(50_000, 300)
    assert span(run_ms(state, job(), 50) or 0) == span(50_000)
    assert run_ms(state, job(estimate_ms=70), 50) == 70
    assert run_ms(state, job(time_limit_ms=9_000), 50) == 9_000
    assert run_ms(State(), job(time_limit_ms=9_000), 50) == 9_000
    assert run_ms(State(), job(), 50) is None


def test_a_job_that_outlived_what_the_user_said_goes_on_as_others_did() -> None:
    running = job(estimate_ms=1_000)
    running.phase, running.running_ms = Phase.RUNNING, 0
    state = State()
    assert left_ms(state, running, 400, 50) == 600
    assert left_ms(state, running, 4_000, 50) is None
    state.estimates = taught(50_000, 300)
    assert 30_000 < (left_ms(state, running, 4_000, 50) or 0) < 50_000


def test_what_runs_and_what_fails_shows_that_jobs_are_not_shorter_and_only_success_an_end() -> None:
    cluster = Cluster(Policy(silent_after_ms=10**9, grace_ms=10**9))
    cluster.join("a")
    failed = cluster.run()
    cluster.wait(50_000)
    cluster.end(failed, code=1)
    everybody = cluster.state.estimates.groups[""]
    assert everybody.ends == 0
    assert everybody.entered[span(50_000)] == 1
    cluster.run()
    cluster.wait(80_000)
    cluster.run()  # events are what moves the learner on
    assert everybody.entered[span(80_000)] == 1
    assert everybody.entered[0] == 3
    for _ in range(ENOUGH):
        done = cluster.run()
        cluster.wait(8_000)
        cluster.end(done)
    assert everybody.ends == ENOUGH


@given(durations)
def test_a_span_holds_what_is_put_into_it(duration_ms: int) -> None:
    at = span(duration_ms)
    assert begin_ms(at) <= duration_ms
    assert duration_ms < begin_ms(at + 1) or at == SPANS - 1


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
    percents = (1, 10, 50, 90, 99)
    found = [estimates.quantile(key, percent, attained_ms) for percent in percents]
    soonest = [estimates.soonest(key, percent, attained_ms) for percent in percents]
    assert found == sorted(found)
    assert found[0] >= attained_ms
    assert all(first <= at for first, at in zip(soonest, found, strict=True))
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


def test_half_of_many_like_jobs_end_within_the_span_of_their_median() -> None:
    estimates = Estimates()
    for _ in range(200):
        estimates.observe(("8", "train"), 3600 * SECOND)
    median_ms = estimates.quantile(("8", "train"), 50)
    assert span(median_ms) == span(3600 * SECOND)


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
    assert estimates.remaining_ms(("8", "slow"), 0) > 2 * unknown_ms
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
