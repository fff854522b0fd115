"""Where jobs go that ran before: where they were, others only for what is gone; and the spares."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.answers.why import explain
from shoal.core.state.events.nodes import NodeJudged
from shoal.core.state.events.queue import JobPromoted
from shoal.core.state.events.runs import JobRequeued
from shoal.model.health import Standing
from shoal.model.job import Outcome, Phase, StopCause
from shoal.model.node import NodeIntent
from shoal.model.reason import render
from tests.core.build import POLICY, node_spec
from tests.core.clockwork import random_history, random_policy
from tests.core.training import Training, policy

RETRIED = {"restart": "on-failure", "retries": 5, "backoff_ms": 0}


def fail(cluster: Training, job_id: str, member: int = 0, code: int = 1) -> None:
    """One member fails, the others are stopped, and the gang runs again."""
    cluster.exit(job_id, code, member)
    cluster.tell()
    cluster.restart(job_id)


# -- the ladder ----------------------------------------------------------------------------


def test_a_job_restarts_where_it_was() -> None:
    cluster = Training(POLICY, "abcd", gpus=2)
    keeps = [cluster.run(gpus=1) for _ in range(3)]
    job_id = cluster.run(gpus=1, members=3, **RETRIED)
    before = [member.slice for member in cluster.job(job_id).members]
    for other in keeps:  # there are better places now
        cluster.end(other)
    fail(cluster, job_id)
    job = cluster.job(job_id)
    assert job.attempt == 2
    assert [member.slice for member in job.members] == before
    assert job.why.startswith("same nodes as before")


def test_when_one_node_is_gone_the_others_stay_by_number() -> None:
    cluster = Training(POLICY, "abcde", gpus=1)
    job_id = cluster.run(gpus=1, members=4)
    before = cluster.nodes_of(job_id)
    lost, spare = before[1], next(n for n in "abcde" if n not in before)
    cluster.learn_gone(lost)
    del cluster.books[lost]
    cluster.restart(job_id)
    expected = [spare if node == lost else node for node in before]
    assert cluster.nodes_of(job_id) == expected
    assert f"3 members in place, 1 on {spare}" in cluster.job(job_id).why


def test_members_that_share_a_node_by_number_stay_or_go_together() -> None:
    cluster = Training(POLICY, "abcd", gpus=2)
    job_id = cluster.run(gpus=1, members=6, members_per_node=2, **RETRIED)
    before = cluster.nodes_of(job_id)
    fail(cluster, job_id)
    assert cluster.nodes_of(job_id) == before
    assert cluster.job(job_id).why.startswith("same nodes as before")
    lost, spare = before[2], next(n for n in "abcd" if n not in before)
    cluster.learn_gone(lost)
    del cluster.books[lost]
    cluster.restart(job_id)
    assert cluster.nodes_of(job_id) == [spare if node == lost else node for node in before]
    assert f"4 members in place, 2 on {spare}" in cluster.job(job_id).why


def test_the_why_says_what_a_restart_costs() -> None:
    cluster = Training(POLICY, "abcd", gpus=2)
    job_id = cluster.run(gpus=2, members=2, **RETRIED)
    for _ in range(5):
        cluster.wait(1_000)
        cluster.hear(*cluster.books)
    fail(cluster, job_id)
    (requeued,) = cluster.events_of(JobRequeued)
    assert requeued.why.endswith("; 5s of work on 4 GPUs lost")


def test_a_place_that_came_back_with_fewer_gpus_is_not_taken() -> None:
    cluster = Training(POLICY, "ab", gpus=4)
    job_id = cluster.run(gpus=4)
    (old,) = cluster.nodes_of(job_id)
    cluster.reboot(old, node_spec(old, gpus=2))
    cluster.hear(old)
    assert cluster.nodes_of(job_id) != [old]
    assert cluster.job(job_id).phase is Phase.STARTING


def test_who_wants_whole_nodes_gets_its_own_back_only_if_they_are_empty() -> None:
    cluster = Training(POLICY, "abc", cpus=4)
    job_id = cluster.run(whole_nodes=True, restart="on-failure", retries=1, backoff_ms=5_000)
    (old,) = cluster.nodes_of(job_id)
    cluster.end(job_id, code=1)
    for _ in range(9):  # so that no two nodes are empty
        cluster.run(cpu_milli=1_000)
    taken = {node for other in cluster.state.jobs for node in cluster.nodes_of(other)}
    cluster.wait(5_000)
    cluster.step()
    assert cluster.job(job_id).phase is (Phase.WAITING if old in taken else Phase.STARTING)


def test_an_elastic_gang_shrinks_when_nothing_replaces_what_is_gone() -> None:
    cluster = Training(POLICY, "abc", gpus=1)
    job_id = cluster.run(gpus=1, members=1, members_max=3)
    assert len(cluster.nodes_of(job_id)) == 3
    cluster.learn_gone("b")
    del cluster.books["b"]
    cluster.restart(job_id)
    assert sorted(cluster.nodes_of(job_id)) == ["a", "c"]
    assert cluster.job(job_id).phase is Phase.RUNNING


# -- failures ------------------------------------------------------------------------------


def test_the_same_failure_at_the_same_step_three_times_is_the_last() -> None:
    cluster = Training(POLICY, "a")
    job_id = cluster.run(**RETRIED)
    for _ in range(3):
        cluster.walk(job_id, 4)
        cluster.exit(job_id, 7)
        cluster.tell()
        cluster.deliver()
        cluster.tell()
    job = cluster.finished[job_id]
    assert (job.outcome, job.code, job.failures) == (Outcome.FAILED, 7, 2)
    assert job.why.endswith("failed 3 times with code 7 at step 4, on a")


def test_failures_that_move_on_use_up_the_retries_alone() -> None:
    cluster = Training(POLICY, "a")
    job_id = cluster.run(**RETRIED)
    for steps in (4, 5, 4, 5, 4):
        cluster.walk(job_id, steps)
        cluster.exit(job_id, 7)
        cluster.tell()
        cluster.deliver()
        cluster.tell()
    assert cluster.job(job_id).failures == 5


def test_who_made_steps_is_tried_again_at_once() -> None:
    cluster = Training(POLICY, "a")
    job_id = cluster.run(restart="on-failure", retries=5, backoff_ms=60_000)
    cluster.exit(job_id, 1)
    cluster.tell()
    assert cluster.job(job_id).not_before_ms == cluster.now_ms + 60_000
    cluster.wait(60_000)
    cluster.tell()
    cluster.deliver()
    cluster.tell()
    cluster.walk(job_id, 1)
    cluster.exit(job_id, 1)
    cluster.tell()
    assert cluster.job(job_id).phase is Phase.STARTING
    assert "retry 2 of 5 at once" in cluster.events_of(JobRequeued)[-1].why


def fails_there(cluster: Training, job_id: str) -> str:
    """It fails twice on one node, and runs well elsewhere when that node is gone for a while."""
    (bad,) = cluster.nodes_of(job_id)
    for _ in range(2):
        cluster.exit(job_id, 1)
        cluster.tell()
        cluster.deliver()
        cluster.tell()
        assert cluster.nodes_of(job_id) == [bad]
    cluster.learn_gone(bad)  # it runs elsewhere
    cluster.deliver()
    cluster.tell(*[name for name in "abcd" if name != bad])
    cluster.reboot(bad)
    cluster.hear(bad)
    cluster.end(job_id)
    assert cluster.finished[job_id].outcome is Outcome.SUCCEEDED
    return bad


def test_one_job_that_fails_only_on_a_node_has_it_checked_at_once_and_closes_nothing() -> None:
    cluster = Training(POLICY, "abcd", gpus=1)
    job_id = cluster.run(gpus=1, **RETRIED)
    bad = fails_there(cluster, job_id)
    record = cluster.node(bad).record
    assert record.standing is Standing.SUSPECT
    assert render(record.why) == f"{job_id} failed 2 times, only on {bad}, and ran well elsewhere"
    assert cluster.node(bad).schedulable
    assert [check.node for check in cluster.checks()] == [bad]  # it did not report in this step
    cluster.answer(bad)
    assert cluster.node(bad).record.standing is Standing.OK
    assert not cluster.node(bad).record.suspicions and not cluster.state.failures.jobs


def test_however_often_one_owners_jobs_fail_there_the_node_stays_open() -> None:
    cluster = Training(POLICY, "abcd", gpus=1)
    for _ in range(4):
        bad = fails_there(cluster, cluster.run(gpus=1, user="mallory", **RETRIED))
        assert cluster.node(bad).schedulable
        cluster.answer(bad)
    assert not any(event.record.strikes for event in cluster.events_of(NodeJudged))


def test_a_node_on_which_jobs_of_several_owners_fail_is_quarantined() -> None:
    cluster = Training(POLICY, "abcd", gpus=1)
    bad = fails_there(cluster, cluster.run(gpus=1, user="ann", **RETRIED))
    assert cluster.node(bad).record.standing is Standing.SUSPECT
    assert fails_there(cluster, cluster.run(gpus=1, user="bob", **RETRIED)) == bad
    assert cluster.node(bad).record.standing is Standing.QUARANTINED


# -- a gang leaves a node in quarantine ----------------------------------------------------

MOVES = policy(silent_after_ms=60_000, move_cost_ms=20_000)


def slowed(cluster: Training, steps_total: int, **fields: object) -> tuple[str, str]:
    """A gang of three with a slow member, whose node was found bad by that and by a check."""
    job_id = cluster.run(gpus=1, members=3, **fields)
    cluster.walk(job_id, 8, steps_total=steps_total, saved_step=1)
    node = cluster.nodes_of(job_id)[1]
    cluster.walk(job_id, 30, slow={1: 3}, steps_total=steps_total)
    cluster.walk(job_id, 1, slow={1: 3}, steps_total=steps_total, saved_step=39)
    assert cluster.standing(node) is Standing.SUSPECT
    return job_id, node


def test_a_gang_leaves_a_slow_node_when_that_is_worth_it() -> None:
    cluster = Training(MOVES, "abcd", gpus=1)
    job_id, slow = slowed(cluster, steps_total=10_000)
    before = cluster.nodes_of(job_id)
    (other,) = [name for name in "abcd" if name not in before]
    cluster.answer(slow, "a fan stands still")
    job = cluster.job(job_id)
    assert (job.phase, job.stop_cause) == (Phase.STOPPING, StopCause.MOVE)
    assert f"leaves {slow}, which is in quarantine, for {other}: without the slow node" in job.why
    assert "worth it" in job.why
    assert job_id in cluster.state.claims
    thief = cluster.submit(gpus=1)  # nobody else gets the place
    cluster.tell()
    cluster.restart(job_id)
    assert cluster.nodes_of(job_id) == [other if node == slow else node for node in before]
    assert cluster.job(job_id).phase is Phase.RUNNING
    assert cluster.job(thief).phase is Phase.WAITING


@pytest.mark.parametrize(
    ("nodes", "steps_total", "fields"),
    [("abcd", 45, {}), ("abc", 10_000, {}), ("abcd", 10_000, {"restart": "never"})],
    ids=["it is nearly done", "there is no room", "it may not be restarted"],
)
def test_a_gang_stays_on_a_bad_node_when(
    nodes: str, steps_total: int, fields: dict[str, str]
) -> None:
    cluster = Training(MOVES, nodes, gpus=1)
    job_id, slow = slowed(cluster, steps_total, **fields)
    cluster.answer(slow, "a fan stands still")
    cluster.walk(job_id, 2, slow={1: 3}, steps_total=steps_total)
    assert cluster.standing(slow) is Standing.QUARANTINED
    assert cluster.job(job_id).phase is Phase.RUNNING


def test_a_gang_that_found_no_room_leaves_when_there_is_some() -> None:
    cluster = Training(MOVES, "abcd", gpus=1)
    blocker = cluster.run(gpus=1)
    job_id, slow = slowed(cluster, steps_total=10_000)
    cluster.answer(slow, "a fan stands still")
    assert cluster.job(job_id).phase is Phase.RUNNING
    cluster.end(blocker)
    cluster.wait(30_000)
    cluster.tell()
    assert cluster.job(job_id).stop_cause is StopCause.MOVE


def test_a_gang_does_not_leave_while_a_node_of_it_is_out_of_contact() -> None:
    cluster = Training(policy(silent_after_ms=5_000, move_cost_ms=20_000), "abcd", gpus=1)
    job_id, slow = slowed(cluster, steps_total=10_000)
    silent = cluster.nodes_of(job_id)[2]
    heard = [name for name in "abcd" if name != silent]
    cluster.wait(5_000)
    cluster.tell(*heard)
    cluster.answer(slow, "a fan stands still")
    assert cluster.job(job_id).phase is Phase.RUNNING


def test_what_leaves_takes_its_members_from_cordoned_nodes_along() -> None:
    cluster = Training(MOVES, "abcde", gpus=1)
    job_id, slow = slowed(cluster, steps_total=10_000)
    _, _, closed = cluster.nodes_of(job_id)
    cluster.intend(closed, NodeIntent.CORDONED)
    cluster.tell()
    cluster.answer(slow, "a fan stands still")
    cluster.restart(job_id)
    assert cluster.job(job_id).phase is Phase.RUNNING
    assert set(cluster.nodes_of(job_id)) == {*"abcde"} - {slow, closed}


# -- spares --------------------------------------------------------------------------------

SPARE = msgspec.structs.replace(POLICY, spares=1)


def why(cluster: Training, job_id: str) -> str:
    return render(explain(cluster.state, cluster.job(job_id), cluster.policy, cluster.now_ms))


def test_fresh_jobs_wait_beside_the_spares_and_are_told_so() -> None:
    cluster = Training(SPARE, "abc", gpus=1)
    cluster.run(gpus=1, members=2)
    job_id = cluster.submit(gpus=1)
    assert cluster.job(job_id).phase is Phase.WAITING
    assert why(cluster, job_id) == (
        "it fits only on c, kept as spares by the policy for gangs that lose a node"
    )


def test_preemptible_jobs_use_the_spares_meanwhile() -> None:
    cluster = Training(SPARE, "abc", gpus=1)
    cluster.run(gpus=1, members=2)
    assert cluster.nodes_of(cluster.run(gpus=1, preemptible=True)) == ["c"]


def test_a_gang_that_lost_a_node_goes_on_with_a_spare() -> None:
    cluster = Training(SPARE, "abc", gpus=1)
    job_id = cluster.run(gpus=1, members=2)
    fresh = cluster.submit(gpus=1)
    cluster.learn_gone("a")
    del cluster.books["a"]
    cluster.restart(job_id)
    assert sorted(cluster.nodes_of(job_id)) == ["b", "c"]
    assert cluster.job(fresh).phase is Phase.WAITING


def test_who_heals_is_not_kept_waiting_by_a_fresh_one_like_it_ahead() -> None:
    """They stand in one lane, and the first may not use what the second may."""
    cluster = Training(SPARE, "abc", gpus=1)
    first, second = cluster.run(gpus=1), cluster.run(gpus=1)
    fresh = cluster.submit(gpus=1)
    cluster.learn_gone(cluster.nodes_of(second)[0])
    assert cluster.nodes_of(second) == ["c"]
    assert cluster.job(first).phase is Phase.RUNNING
    assert cluster.job(fresh).phase is Phase.WAITING


def test_a_node_that_becomes_the_spare_frees_the_one_before_it() -> None:
    cluster = Training(SPARE, "a", gpus=4)
    job_id = cluster.submit(gpus=4)
    assert cluster.job(job_id).phase is Phase.WAITING
    cluster.join("b", gpus=1)  # too small for the job itself
    assert cluster.nodes_of(job_id) == ["a"]


def test_nobody_is_stopped_for_room_on_a_spare() -> None:
    cluster = Training(msgspec.structs.replace(SPARE, run_ms_min=0), "ab", gpus=1)
    cluster.run(gpus=1)
    cluster.run(gpus=1, preemptible=True, checkpoint_ms=1_000)
    cluster.wait(60_000)
    cluster.tell()
    job_id = cluster.submit(gpus=1, priority=10)
    assert cluster.job(job_id).phase is Phase.WAITING
    assert job_id not in cluster.state.claims


def test_elastic_gangs_do_not_grow_into_the_spares() -> None:
    cluster = Training(msgspec.structs.replace(SPARE, run_ms_min=0), "abc", gpus=1)
    job_id = cluster.run(gpus=1, members_max=3, checkpoint_ms=1_000)
    for _ in range(3):
        cluster.wait(10_000)
        cluster.tell()
        cluster.restart(job_id)
    assert len(cluster.nodes_of(job_id)) == 2


def test_a_job_that_never_fits_beside_the_spares_holds_up_nobody() -> None:
    cluster = Training(msgspec.structs.replace(SPARE, patience_ms=1_000), "abc", gpus=1)
    large = cluster.submit(gpus=1, members=3)
    cluster.wait(60_000)
    cluster.tell()
    small = cluster.submit(gpus=1)
    assert cluster.job(large).phase is Phase.WAITING
    assert cluster.job(small).phase is Phase.STARTING


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_beside_spares_and_elders_nobody_waits_without_a_reason(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of these histories is checked for that, the partial walks too."""
    monkeypatch.setattr("shoal.core.state.state.ELDER_FACTOR", 1)
    promoted = 0
    for seed in range(first, first + 10):
        rules = msgspec.structs.replace(
            random_policy(seed), order="fair", spares=seed % 3, elder_ms=1_000
        )
        cluster = random_history(seed, rules)
        promoted += len(cluster.events_of(JobPromoted))
    assert promoted
