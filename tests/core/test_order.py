"""In which order waiting jobs are tried, and by whom they may be overtaken."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.scheduling.order import Walk, place_in_line
from shoal.core.state.apply_queue import add_job, join_queue, leave_queue, wake_delayed
from shoal.core.state.estimates import ENOUGH
from shoal.core.state.events.queue import JobPromoted
from shoal.core.state.load import restore
from shoal.core.state.state import State
from shoal.model.job import Job, Phase
from shoal.model.policy import Policy
from tests.core.build import Cluster, examples, job_spec


def job_of(number: int, priority: int, members: int, gpus: int) -> Job:
    spec = job_spec(priority=priority, members=members, gpus=gpus)
    return Job(id=f"j{number}", number=number, spec=spec)


JOBS = st.lists(
    st.tuples(st.integers(-2, 2), st.integers(1, 2), st.integers(0, 2)), max_size=12
).map(lambda rows: [job_of(number, *row) for number, row in enumerate(rows, start=1)])


def state_with(jobs: Iterable[Job]) -> State:
    """They wait, in a state whose queue they joined in this order."""
    state = State(FUNCTIONS)
    for job in jobs:
        add_job(state, job)
    return state


def walk(state: State) -> list[int]:
    """Every waiting job in turn, as when each of them finds a place."""
    turns, numbers = Walk(state, 0, list(state.queue.lanes)), []
    while (head := turns.next()) is not None:
        _, job, lane = head
        assert state.queue.lane[job.number] == lane
        numbers.append(job.number)
        leave_queue(state, job)
        turns.again(lane)
    return numbers


@examples
@given(jobs=JOBS, data=st.data())
def test_the_order_is_by_priority_then_by_submission_whatever_the_history(
    jobs: list[Job], data: st.DataObject
) -> None:
    state = state_with(data.draw(st.permutations(jobs)))
    for job in data.draw(st.lists(st.sampled_from(jobs), unique_by=id) if jobs else st.just([])):
        leave_queue(state, job)  # as a placement does, and then a requeue
        join_queue(state, job)
    expected = sorted(jobs, key=lambda job: (-job.spec.priority, job.number))
    assert walk(state) == [job.number for job in expected]
    assert state.queue.size == 0


def test_once_a_job_does_not_fit_others_of_its_lane_are_not_tried() -> None:
    state = state_with([*(job_of(number, 0, 1, 1) for number in range(1, 4)), job_of(9, 0, 1, 2)])
    turns, heads = Walk(state, 0, list(state.queue.lanes)), []
    while (head := turns.next()) is not None:
        heads.append(head[1].number)
    assert heads == [1, 9]


def test_a_delayed_job_takes_its_old_place_when_its_time_has_come() -> None:
    early, late = job_of(1, 0, 1, 0), job_of(2, 0, 1, 0)
    early.not_before_ms = 500
    state = state_with([late, early])
    wake_delayed(state, 499)
    assert [when_ms for when_ms, _ in state.queue.delayed] == [500]
    wake_delayed(state, 500)
    assert walk(state) == [1, 2]


# -- overtaking ----------------------------------------------------------------------------


def blocked_cluster(patience_ms: int) -> tuple[Cluster, str]:
    """One of two GPUs is busy; a job that needs both is first in the queue."""
    cluster = Cluster(Policy(patience_ms=patience_ms, silent_after_ms=10**9, grace_ms=10**9))
    cluster.join("a", gpus=2)
    cluster.run(gpus=1)
    return cluster, cluster.submit(gpus=2)


def test_a_blocked_job_may_be_overtaken_for_as_long_as_the_policy_says_and_no_longer() -> None:
    cluster, big = blocked_cluster(patience_ms=10_000)
    cluster.wait(9_999)
    small = cluster.run(gpus=1)
    assert cluster.job(small).phase is Phase.RUNNING
    cluster.end(small)
    cluster.wait(1)
    held = cluster.submit(gpus=1)
    assert cluster.job(held).phase is Phase.WAITING
    cluster.end("j1")
    assert cluster.job(big).phase is Phase.STARTING


def test_a_job_of_higher_priority_is_not_held_up_by_a_blocked_one_behind_it() -> None:
    cluster, _ = blocked_cluster(patience_ms=0)
    assert cluster.job(cluster.submit(gpus=1, priority=5)).phase is Phase.STARTING
    assert cluster.job(cluster.submit(gpus=0)).phase is Phase.WAITING


def test_a_job_that_waits_for_a_node_to_return_holds_up_nobody() -> None:
    cluster, _ = blocked_cluster(patience_ms=0)
    cluster.join("b", gpus=4)
    cluster.learn_gone("b")
    cluster.submit(gpus=4, priority=5)
    cluster.end("j1")
    assert cluster.job("j2").phase is Phase.STARTING


# -- turns and elders -----------------------------------------------------------------------

TURNS: dict[str, object] = {"preemptible": True, "checkpoint_ms": 1}


def test_who_takes_turns_goes_by_what_is_learned_of_its_kind() -> None:
    """Nobody says how long jobs run: those called quick did end soon, those called slow did not."""
    cluster = Cluster()
    cluster.join("a", gpus=1)
    for name, run_ms in [("quick", 5_000), ("slow", 4_000_000)] * ENOUGH:
        job_id = cluster.run(gpus=1, name=f"{name}-{run_ms}", **TURNS)
        cluster.wait(run_ms)
        cluster.end(job_id)
    cluster.run(gpus=1)
    slow = cluster.submit(gpus=1, name="slow-9", **TURNS)
    quick = cluster.submit(gpus=1, name="quick-9", **TURNS)
    first, second = (place_in_line(cluster.state, cluster.job(j), 0) for j in (quick, slow))
    assert first < second


def test_who_waited_for_too_long_comes_first_one_at_a_time_and_until_it_has_ended() -> None:
    policy = Policy(elder_ms=1_000, silent_after_ms=10**9, grace_ms=10**9)
    cluster = Cluster(policy)
    cluster.join("a", gpus=1)
    hog = cluster.run(gpus=1)
    old, older = cluster.submit(gpus=1, **TURNS), cluster.submit(gpus=1, **TURNS)
    cluster.wait(1_001)
    cluster.state.ages.jobs = 10**6  # jobs here are young when they end
    cluster.step()
    assert cluster.state.elder == old
    assert not cluster.job(older).elder
    assert any(isinstance(event, JobPromoted) for event in cluster.log)
    cluster.end(hog)
    assert cluster.job(old).phase is Phase.STARTING
    assert cluster.state.elder == old
    restored = restore(cluster.state.snapshot())
    assert restored.elder == old
    cluster.end(old)
    assert cluster.state.elder != old


def test_in_a_cluster_where_everybody_waits_nobody_is_an_exception() -> None:
    cluster = Cluster(Policy(elder_ms=1_000, silent_after_ms=10**9, grace_ms=10**9))
    cluster.join("a", gpus=1)
    cluster.run(gpus=1)
    for _ in range(5):
        cluster.submit(gpus=1, **TURNS)
    cluster.wait(3_600_000)
    cluster.step()
    assert cluster.state.elder is None
