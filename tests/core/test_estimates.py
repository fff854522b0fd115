"""How long jobs will run, by what jobs like them did."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.estimates import COUNT_MAX, ENOUGH, GROUPS_MAX, Estimates
from shoal.core.scheduling.expect import left_ms, run_ms
from shoal.core.state import State
from shoal.model.job import Job, Phase
from tests.core.build import Cluster, examples, job_spec


def job(**fields: object) -> Job:
    return Job(id="j1", number=1, spec=job_spec(**fields))


def taught(ran_ms: int, times: int = ENOUGH, **fields: object) -> Estimates:
    estimates = Estimates()
    for _ in range(times):
        estimates.learn(job(**fields), ran_ms)
    return estimates


@examples
@given(ran_ms=st.integers(4, 10**9), percent=st.integers(1, 100))
def test_an_expectation_is_never_too_short_and_at_most_a_quarter_too_long(
    ran_ms: int, percent: int
) -> None:
    expected = taught(ran_ms).expect(job(), percent)
    assert expected is not None
    assert ran_ms <= expected <= ran_ms * 5 // 4


@examples
@given(times=st.lists(st.integers(4, 10**7), min_size=ENOUGH, max_size=COUNT_MAX))
def test_so_many_of_a_hundred_were_done_by_then(times: list[int]) -> None:
    estimates = Estimates()
    for ran_ms in times:
        estimates.learn(job(), ran_ms)
    for percent in (50, 90, 100):
        expected = estimates.expect(job(), percent)
        assert expected is not None
        assert sum(ran_ms <= expected for ran_ms in times) * 100 >= percent * len(times)


def test_nobody_knows_before_enough_jobs_have_ended() -> None:
    assert taught(1_000, ENOUGH - 1).expect(job(), 50) is None


def test_a_group_that_knows_too_little_leaves_it_to_a_coarser_one() -> None:
    estimates = taught(1_000, 20, tenant="a", name="train", gpus=8)
    for other in ({"tenant": "a"}, {"tenant": "b", "gpus": 8}, {"tenant": "b"}):
        known = estimates.expect(job(**other), 50)
        assert known is not None
        assert known < 2_000
    for _ in range(ENOUGH):
        estimates.learn(job(tenant="b", name="test", gpus=8), 100_000)
    fine = estimates.expect(job(tenant="b", name="test", gpus=8), 50)
    assert fine is not None
    assert fine >= 100_000
    coarse = estimates.expect(job(tenant="a", name="train", gpus=8), 50)
    assert coarse is not None
    assert coarse < 2_000


def test_what_is_recent_weighs_more() -> None:
    estimates = taught(1_000, 10 * COUNT_MAX)
    for _ in range(2 * COUNT_MAX):
        estimates.learn(job(), 60_000)
    expected = estimates.expect(job(), 50)
    assert expected is not None
    assert expected >= 60_000


def test_what_is_remembered_is_bounded() -> None:
    estimates = Estimates()
    for number in range(2 * GROUPS_MAX):
        estimates.learn(job(name=f"n{number}", tenant=f"t{number}"), number)
    assert len(estimates.groups) == GROUPS_MAX
    assert all(sum(counts.values()) <= COUNT_MAX + 1 for counts in estimates.groups.values())


def test_the_user_knows_better_and_a_time_limit_is_the_most() -> None:
    state = State()
    state.estimates = taught(50_000)
    assert run_ms(state, job(), 50) == 57_344
    assert run_ms(state, job(estimate_ms=70), 50) == 70
    assert run_ms(state, job(time_limit_ms=9_000), 50) == 9_000
    assert run_ms(State(), job(time_limit_ms=9_000), 50) == 9_000
    assert run_ms(State(), job(), 50) is None


def test_a_job_that_outlived_what_was_expected_goes_on_for_a_part_of_its_age() -> None:
    running = job(estimate_ms=1_000)
    running.phase, running.running_ms = Phase.RUNNING, 0
    assert left_ms(State(), running, 400, 50) == 600
    assert left_ms(State(), running, 4_000, 50) == 1_000


def test_only_jobs_that_succeeded_teach_and_all_their_kept_work_counts() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=2)
    failed = cluster.run()
    cluster.wait(500)
    cluster.end(failed, code=1)
    assert cluster.state.estimates.groups == {}
    for _ in range(ENOUGH):
        done = cluster.run()
        cluster.wait(8_000)
        cluster.end(done)
    assert run_ms(cluster.state, job(), 50) == 8_192
