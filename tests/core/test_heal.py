"""What becomes of jobs that something happened to."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.phases.heal import NODE_LOST_CODE, TIMED_OUT_CODE
from shoal.core.state.ending import stop
from shoal.core.state.round import Round
from shoal.model.job import MemberRef, Outcome, Phase, StopCause
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Refused, Requeue
from tests.core.build import POLICY, Cluster, kinds


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.join("a", gpus=2)
    made.join("b", gpus=2)
    return made


def policy(**numbers: int) -> Policy:
    return msgspec.structs.replace(POLICY, **numbers)


# -- failures and retries ------------------------------------------------------------------


def test_a_job_that_fails_has_failed_unless_it_may_be_retried(cluster: Cluster) -> None:
    job_id = cluster.run(retries=5)
    cluster.end(job_id, code=3, why="out of memory")
    job = cluster.finished[job_id]
    assert (job.outcome, job.code) == (Outcome.FAILED, 3)
    assert job.why == "it exited 3 (out of memory)"


def test_a_job_that_ends_well_may_say_why(cluster: Cluster) -> None:
    said = cluster.run()
    cluster.end(said, why="nobody has used it for 2h")
    assert cluster.finished[said].why == "every member exited 0: nobody has used it for 2h"
    silent = cluster.run()
    cluster.end(silent)
    assert cluster.finished[silent].why == "every member exited 0"


def test_retries_wait_twice_as_long_each_time_up_to_the_policys_maximum() -> None:
    cluster = Cluster(policy(backoff_ms_max=5_000))
    cluster.join("a")
    job_id = cluster.run(restart="on-failure", retries=4, backoff_ms=1_000)
    waits = []
    for _ in range(4):
        cluster.end(job_id, code=1)
        job = cluster.job(job_id)
        waits.append(job.not_before_ms - cluster.now_ms)
        cluster.wait(waits[-1] - 1)
        cluster.hear("a")
        assert cluster.job(job_id).phase is Phase.WAITING
        cluster.wait(1)
        cluster.step()
        cluster.deliver()
        cluster.hear("a")
        assert cluster.job(job_id).phase is Phase.RUNNING
    assert waits == [1_000, 2_000, 4_000, 5_000]
    cluster.end(job_id, code=1)
    assert cluster.finished[job_id].attempt == 5
    assert "its retries (4) are used up" in cluster.finished[job_id].why


def test_a_backoff_of_nothing_retries_at_once(cluster: Cluster) -> None:
    job_id = cluster.run(restart="on-failure", retries=1, backoff_ms=0)
    assert kinds(cluster.end(job_id, code=1).events)[-1] == "JobPlaced"


def test_when_one_member_fails_the_others_are_stopped_before_anything_is_decided(
    cluster: Cluster,
) -> None:
    job_id = cluster.run(gpus=2, members=2)
    cluster.end(job_id, code=9, member=0)
    job = cluster.job(job_id)
    assert (job.phase, job.stop_cause) == (Phase.STOPPING, StopCause.FAILURE)
    cluster.deliver()
    cluster.end(job_id, code=143, member=1)
    job = cluster.finished[job_id]
    assert (job.outcome, job.code) == (Outcome.FAILED, 9)
    assert job.why == "member 0 on a exited 9"


def test_a_signal_is_named_as_one(cluster: Cluster) -> None:
    job_id = cluster.run()
    cluster.end(job_id, code=128 + 11)
    assert cluster.finished[job_id].why == "it was ended by signal 11"


# -- losses --------------------------------------------------------------------------------


def test_the_loss_of_a_node_costs_no_retry(cluster: Cluster) -> None:
    job_id = cluster.run(restart="on-failure", retries=0)
    cluster.learn_gone("a")
    job = cluster.job(job_id)
    assert (job.attempt, job.failures, job.losses) == (2, 0, 1)


def test_a_job_that_is_never_restarted_fails_with_its_node(cluster: Cluster) -> None:
    job_id = cluster.run(restart="never")
    cluster.learn_gone("a")
    job = cluster.finished[job_id]
    assert (job.outcome, job.code) == (Outcome.FAILED, NODE_LOST_CODE)
    assert job.why == "lost with a, and restart is never"


def test_losses_are_bounded_by_the_policy() -> None:
    cluster = Cluster(policy(losses_max=2))
    cluster.join("a")
    job_id = cluster.run()
    for _ in range(3):
        cluster.reboot("a")
        cluster.hear("a")
        cluster.deliver()
        cluster.hear("a")
    job = cluster.finished[job_id]
    assert (job.outcome, job.attempt) == (Outcome.FAILED, 3)


def test_what_is_left_of_a_gang_is_stopped_before_the_gang_runs_again(cluster: Cluster) -> None:
    cluster.join("c", gpus=2)
    job_id = cluster.run(gpus=2, members=2)
    cluster.learn_gone("a")
    job = cluster.job(job_id)
    assert (job.phase, job.stop_cause, job.attempt) == (Phase.STOPPING, StopCause.NODE_LOSS, 1)
    cluster.deliver()
    cluster.end(job_id, code=143, member=1)
    job = cluster.job(job_id)
    assert (job.attempt, job.failures, job.losses) == (2, 0, 1)


def test_peers_that_fail_because_a_node_died_are_the_nodes_failure(cluster: Cluster) -> None:
    job_id = cluster.run(gpus=2, members=2)
    cluster.end(job_id, code=1, member=1)
    cluster.learn_gone("a")
    job = cluster.job(job_id)
    assert (job.phase, job.failures, job.losses) == (Phase.WAITING, 0, 1)


# -- limits, cancelling, draining ----------------------------------------------------------


def test_a_job_out_of_time_is_stopped_and_has_timed_out(cluster: Cluster) -> None:
    job_id = cluster.run(time_limit_ms=2_500)
    cluster.wait(2_499)
    assert cluster.step().events == []
    cluster.wait(1)
    assert kinds(cluster.step().events) == ["JobStopping"]
    cluster.deliver()
    cluster.end(job_id, code=143)
    job = cluster.finished[job_id]
    assert (job.outcome, job.code) == (Outcome.TIMED_OUT, TIMED_OUT_CODE)
    assert job.why == "reached its time limit of 2.5s"


def test_time_spent_waiting_does_not_count_against_the_limit() -> None:
    cluster = Cluster()
    job_id = cluster.submit(time_limit_ms=2_000)
    cluster.wait(10_000)
    cluster.join("a")
    cluster.wait(10_000)
    cluster.deliver()
    cluster.hear("a")
    assert cluster.job(job_id).phase is Phase.RUNNING
    cluster.wait(1_999)
    assert cluster.step().events == []


def test_each_attempt_has_the_whole_time_limit(cluster: Cluster) -> None:
    job_id = cluster.run(time_limit_ms=2_000, restart="on-failure", retries=1, backoff_ms=0)
    cluster.wait(1_500)
    cluster.end(job_id, code=1)
    cluster.deliver()
    cluster.hear("a")
    cluster.wait(1_000)
    assert cluster.step().events == []
    cluster.wait(1_000)
    assert kinds(cluster.step().events) == ["JobStopping"]


def test_a_cancelled_job_ends_when_its_processes_did_and_keeps_its_reason(
    cluster: Cluster,
) -> None:
    """Found by simulation: the exit by our own signal had replaced why it was cancelled."""
    job_id = cluster.run()
    assert cluster.cancel(job_id) == Accepted(job_id)
    cluster.deliver()
    cluster.end(job_id, code=143, why="terminated")
    job = cluster.finished[job_id]
    assert (job.outcome, job.why) == (Outcome.CANCELLED, "cancelled by a user")


def test_a_waiting_job_is_cancelled_at_once() -> None:
    cluster = Cluster()
    job_id = cluster.submit()
    cluster.cancel(job_id)
    assert cluster.finished[job_id].outcome is Outcome.CANCELLED


def test_a_job_whose_node_dies_while_it_is_cancelled_is_cancelled(cluster: Cluster) -> None:
    job_id = cluster.run()
    cluster.cancel(job_id)
    cluster.learn_gone("a")
    assert cluster.finished[job_id].outcome is Outcome.CANCELLED


def test_draining_moves_what_may_be_restarted_and_leaves_the_rest(cluster: Cluster) -> None:
    moves = cluster.run(gpus=1)
    stays = cluster.run(gpus=1, restart="never")
    assert {cluster.job(job).members[0].slice.node for job in (moves, stays)} == {"a"}
    cluster.intend("a", NodeIntent.DRAINING)
    cluster.deliver()
    cluster.end(moves, code=143)
    job = cluster.job(moves)
    assert (job.members[0].slice.node, job.failures, job.losses) == ("b", 0, 0)
    assert cluster.job(stays).phase is Phase.RUNNING


def test_a_drained_job_says_why_it_moved(cluster: Cluster) -> None:
    job_id = cluster.run()
    cluster.intend("a", NodeIntent.DRAINING)
    cluster.intend("b", NodeIntent.CORDONED)
    cluster.deliver()
    cluster.end(job_id, code=143)
    assert cluster.job(job_id).why == "stopped to run again: a is being drained"


def test_cordoning_disturbs_nothing_that_runs(cluster: Cluster) -> None:
    job_id = cluster.run()
    assert kinds(cluster.step().events) == []
    cluster.intend("a", NodeIntent.CORDONED)
    assert kinds(cluster.last.events) == ["NodeIntended"]
    assert cluster.job(job_id).phase is Phase.RUNNING
    assert cluster.job(cluster.submit()).members[0].slice.node == "b"


# -- asked to run again --------------------------------------------------------------------


def test_a_job_that_is_requeued_stops_and_runs_again_at_no_cost_to_its_retries(
    cluster: Cluster,
) -> None:
    job_id = cluster.run(retries=1)
    assert cluster.ask(Requeue(job_id)) == Accepted(job_id)
    job = cluster.job(job_id)
    assert (job.phase, job.stop_cause, job.why) == (
        Phase.STOPPING,
        StopCause.MOVE,
        "requeued by a user",
    )
    again = cluster.ask(Requeue(job_id))
    assert isinstance(again, Accepted)
    assert again.note == "it is already stopping"
    cluster.end(job_id, code=143)
    assert (cluster.job(job_id).attempt, cluster.job(job_id).failures) == (2, 0)


def test_only_a_live_job_can_be_requeued(cluster: Cluster) -> None:
    answer = cluster.ask(Requeue("j9"))
    assert isinstance(answer, Refused)
    assert answer.missing


# -- what is done is done --------------------------------------------------------------------


@pytest.mark.parametrize("cause", list(StopCause))
def test_a_job_whose_members_all_exited_0_has_succeeded_whatever_it_was_stopped_for(
    cluster: Cluster, cause: StopCause
) -> None:
    """Its output was still on the way when the order came."""
    job_id = cluster.run(members=2, gpus=1)
    job = cluster.job(job_id)
    for number, member in enumerate(job.members):
        cluster.books[member.slice.node].ends(MemberRef(job_id, 1, number))
    stop(Round(cluster.state, cluster.policy, cluster.now_ms), job, cause, "somebody said so")
    cluster.hear("a", "b")
    assert [type(order).__name__ for order in cluster.deliver()] == []
    cluster.exit(job_id, 0, 0)
    cluster.end(job_id, 0, 1)
    job = cluster.finished[job_id]
    assert (job.outcome, job.code) == (Outcome.SUCCEEDED, 0)
    assert job.why == "every member exited 0 before it was stopped: somebody said so"


def test_a_member_that_exits_0_because_it_was_told_to_stop_has_not_done_its_work(
    cluster: Cluster,
) -> None:
    job_id = cluster.run(members=2, gpus=2)
    cluster.end(job_id, 0, 0)
    cluster.intend(cluster.job(job_id).members[1].slice.node, NodeIntent.DRAINING)
    cluster.deliver()
    cluster.end(job_id, 0, 1)
    job = cluster.job(job_id)
    assert (job.phase, job.attempt) == (Phase.WAITING, 1)


def test_the_reason_names_the_member_that_failed_first(cluster: Cluster) -> None:
    """Its peers often fail with the same code a moment later."""
    job_id = cluster.run(members=2, gpus=2)
    cluster.end(job_id, 1, 1, why="no such file")
    cluster.end(job_id, 1, 0)
    node = cluster.finished[job_id].members[1].slice.node
    assert cluster.finished[job_id].why == f"member 1 on {node} exited 1 (no such file)"
