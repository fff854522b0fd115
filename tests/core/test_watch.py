"""What members' beats and nodes' checks tell: saved work, slow members, hangs, bad nodes."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.core.answers.why import explain
from shoal.core.features.health import SAVED_MS
from shoal.core.invariants import Violation, verify
from shoal.core.state.events.nodes import NodeChecked, NodeJudged, NodeLost
from shoal.core.state.events.runs import JobCheckpointed, JobStopping, JobUnsaved
from shoal.model.commands import Stop
from shoal.model.health import Standing
from shoal.model.job import MemberRef, Outcome, Phase, StopCause
from shoal.model.node import NodeIntent
from shoal.model.progress import Beat
from shoal.model.reason import render
from shoal.model.report import Accepted, CheckNode, Refused
from tests.core.training import Training, policy

RULES = policy(silent_after_ms=10_000, hang_after_ms=30_000, retest_ms=60_000)
SLOW_FOR = 30  # so many steps are enough to be sure of it


@pytest.fixture
def cluster() -> Training:
    return Training(RULES, "abcd", gpus=1)


def train(cluster: Training, members: int = 4, **fields: object) -> str:
    return cluster.run(gpus=1, members=members, **fields)


def say(cluster: Training, job_id: str, **fields: Any) -> None:
    """The members' next beat, without a step."""
    job = cluster.job(job_id)
    for number in range(len(job.members)):
        ref = MemberRef(job_id, job.attempt, number)
        cluster.beats[ref] = Beat(ref=str(ref), **fields)
        cluster.stepped_ms[ref] = cluster.now_ms
    cluster.tell()


# -- checkpoints ---------------------------------------------------------------------------


def test_a_saved_step_becomes_an_event_once(cluster: Training) -> None:
    job_id = train(cluster)
    cluster.walk(job_id, 3, saved_step=2)
    cluster.walk(job_id, 2, saved_step=4)
    cluster.stand(3_000)
    saved = cluster.events_of(JobCheckpointed)
    assert [event.step for event in saved] == [2, 4]
    assert cluster.job(job_id).saved_step == 4


def test_a_job_that_saves_all_the_time_is_noted_now_and_then(cluster: Training) -> None:
    """A node may lie about how often, too. What happens to the job next knows the newest."""
    job_id = train(cluster, 1)
    for step in range(1, 401):
        cluster.wait(10)
        say(cluster, job_id, saved_step=step)
    assert [event.step for event in cluster.events_of(JobCheckpointed)] == [1]
    cluster.wait(SAVED_MS)
    say(cluster, job_id, saved_step=401)
    say(cluster, job_id, saved_step=402)
    cluster.learn_gone(cluster.nodes_of(job_id)[0])
    assert [event.step for event in cluster.events_of(JobCheckpointed)] == [1, 401, 402]
    assert cluster.job(job_id).saved_step == 402
    both = [type(event) for event in cluster.log if isinstance(event, JobCheckpointed | NodeLost)]
    assert both[-2:] == [JobCheckpointed, NodeLost], "before its node is written off"
    assert not cluster.state.heard.unsaved


def test_saves_that_fail_are_said_at_once_and_then_ever_more_rarely(cluster: Training) -> None:
    job_id = train(cluster, 2)
    said = []
    for wait_ms, unsaved in ((0, 1), (3_000, 2), (60_000, 3), (1_000, 0), (1_000, 0)):
        cluster.wait(wait_ms)
        say(cluster, job_id, unsaved=unsaved)
        said.append([event.failed for event in cluster.events_of(JobUnsaved)])
        assert cluster.state.heard.watches[job_id].unsaved == unsaved
    assert said == [[1], [1], [1, 3], [1, 3], [1, 3]]


def test_a_save_that_only_the_exit_tells_of_counts(cluster: Training) -> None:
    job_id = train(cluster, 1)
    say(cluster, job_id, saved_step=3)
    (ref,) = [ref for book in cluster.books.values() for ref in book.alive if ref.job == job_id]
    book = next(book for book in cluster.books.values() if ref in book.alive)
    book.exited(ref, 1, saved_step=7)
    cluster.tell()
    assert [event.step for event in cluster.events_of(JobCheckpointed)] == [3, 7]


def test_what_was_saved_does_not_go_back_with_a_new_attempt(cluster: Training) -> None:
    job_id = train(cluster, members=1, restart="on-failure", retries=1)
    cluster.walk(job_id, 3, saved_step=2)
    cluster.end(job_id, code=1)
    cluster.deliver()
    cluster.tell()
    cluster.walk(job_id, 2, saved_step=1)
    assert cluster.job(job_id).attempt == 2
    assert cluster.job(job_id).saved_step == 2


def test_beats_of_an_attempt_that_is_over_say_nothing(cluster: Training) -> None:
    job_id = train(cluster, members=1)
    cluster.walk(job_id, 2)
    book = cluster.books[cluster.nodes_of(job_id)[0]]
    late = book.report()
    cluster.end(job_id)
    cluster.hear_reports(late)
    assert cluster.state.heard.watches == {}


# -- slow members --------------------------------------------------------------------------


def test_a_slow_member_makes_its_node_suspect_and_a_check_is_sent_until_answered(
    cluster: Training,
) -> None:
    job_id = train(cluster)
    cluster.walk(job_id, 8)
    slow = cluster.nodes_of(job_id)[2]
    cluster.walk(job_id, SLOW_FOR, slow={2: 3})
    assert cluster.standing(slow) is Standing.SUSPECT
    assert f"member 2 of {job_id} takes 3000 ms" in render(cluster.node(slow).record.why)
    ids = set()
    for _ in range(3):
        cluster.tell()
        assert not cluster.checks()  # a report that answers the command is no reason for another
        cluster.wait(1_000)
        cluster.tell()
        (asked,) = cluster.checks()
        assert asked.node == slow
        ids.add(asked.id)
    assert len(ids) == 1
    cluster.answer(slow)
    assert cluster.standing(slow) is Standing.OK
    assert cluster.job(job_id).phase is Phase.RUNNING
    cluster.tell()
    assert cluster.checks() == []


def test_a_member_that_is_done_early_does_not_keep_the_others_from_being_measured(
    cluster: Training,
) -> None:
    job_id = train(cluster)
    cluster.walk(job_id, 8)
    cluster.exit(job_id, code=0, member=3)
    cluster.tell()
    cluster.walk(job_id, SLOW_FOR, slow={1: 3})
    slow = cluster.job(job_id).members[1].slice.node
    assert cluster.node(slow).record.standing is not Standing.OK


def test_an_equal_gang_suspects_nobody(cluster: Training) -> None:
    job_id = train(cluster)
    cluster.walk(job_id, 60)
    assert cluster.events_of(NodeJudged) == []


def test_a_failed_check_quarantines_and_nothing_new_goes_there(cluster: Training) -> None:
    cluster.quarantine("a")
    cluster.submit(gpus=1, members=4)
    job_id = "j1"
    assert cluster.job(job_id).phase is Phase.WAITING
    (checked,) = cluster.events_of(NodeChecked)
    assert (checked.node, checked.passed) == ("a", False)
    cluster.submit(gpus=1, members=3)
    assert sorted(cluster.nodes_of("j2")) == ["b", "c", "d"]


def test_the_reason_to_wait_names_the_quarantine(cluster: Training) -> None:
    cluster.quarantine("a")
    job_id = cluster.submit(gpus=1, members=4)
    why = render(explain(cluster.state, cluster.job(job_id), cluster.policy, cluster.now_ms))
    assert "a is quarantined (check failed: a fault)" in why


def test_a_retest_that_passes_brings_a_node_back(cluster: Training) -> None:
    cluster.quarantine("a")
    job_id = cluster.submit(gpus=1, members=4)
    cluster.wait(59_000)
    cluster.tell()
    assert cluster.checks() == []
    cluster.wait(1_000)
    cluster.tell()
    cluster.answer("a", "still a fault")
    assert cluster.standing("a") is Standing.QUARANTINED
    cluster.wait(120_000)  # twice the wait
    cluster.tell()
    cluster.answer("a")
    assert cluster.standing("a") is Standing.OK
    assert cluster.job(job_id).phase is Phase.STARTING
    assert len(cluster.node("a").record.history) == 3


def test_a_check_by_hand_that_fails_does_not_make_a_quarantine_longer(cluster: Training) -> None:
    cluster.quarantine("a")
    before = cluster.node("a").record
    cluster.wait(1_000)
    cluster.ask(CheckNode("a"))
    cluster.tell("a")
    cluster.answer("a", "a fault")
    assert cluster.node("a").record == before
    cluster.wait(1_000)
    cluster.ask(CheckNode("a"))
    cluster.tell("a")
    cluster.answer("a")
    assert cluster.standing("a") is Standing.OK


def test_a_probe_that_cannot_run_does_not_end_a_quarantine(cluster: Training) -> None:
    cluster.quarantine("a")
    cluster.wait(60_000)
    cluster.tell()
    cluster.answer("a", error="no python there")
    assert cluster.standing("a") is Standing.QUARANTINED


def test_no_more_than_a_share_is_quarantined_and_nodes_that_left_do_not_count(
    cluster: Training,
) -> None:
    cluster.quarantine("a")
    cluster.step(requests=(CheckNode("b"),))
    cluster.tell("b")
    cluster.answer("b", "a fault")
    assert cluster.standing("b") is Standing.OK
    cluster.intend("a", NodeIntent.REMOVED)
    cluster.wait(1)
    cluster.quarantine("b")


def test_a_node_that_left_in_quarantine_is_not_tested_again(cluster: Training) -> None:
    cluster.quarantine("a")
    cluster.intend("a", NodeIntent.REMOVED)
    judged = len(cluster.events_of(NodeJudged))
    for _ in range(4):
        cluster.wait(600_000)
        cluster.tell("b")
    assert len(cluster.events_of(NodeJudged)) == judged
    assert cluster.standing("a") is Standing.QUARANTINED


def test_the_checks_notice_a_quarantined_node_that_is_offered(cluster: Training) -> None:
    cluster.quarantine("a")
    verify(cluster.state)
    node = cluster.node("a")
    cluster.state.cluster.add(node.index, cluster.state.rooms[node.index])
    with pytest.raises(Violation, match="free index"):
        verify(cluster.state)


# -- asked by hand -------------------------------------------------------------------------


def test_a_check_by_hand_is_asked_until_it_is_answered(cluster: Training) -> None:
    answer = cluster.ask(CheckNode("a"))
    assert isinstance(answer, Accepted)
    assert cluster.ask(CheckNode("a")) == answer  # it is the same one
    cluster.tell("a", "b")
    (asked,) = cluster.checks()
    assert (asked.node, asked.id) == ("a", answer.id)
    cluster.answer("a", figures={"memory_mbs": 5_000})
    check_id, result, verdict = cluster.state.heard.verdicts["a"]
    assert (check_id, result.figures, verdict.passed) == (answer.id, {"memory_mbs": 5_000}, True)
    cluster.tell("a")
    assert cluster.checks() == []


def test_who_is_not_there_cannot_be_checked(cluster: Training) -> None:
    gone = cluster.ask(CheckNode("z"))
    assert isinstance(gone, Refused) and gone.missing
    cluster.learn_gone("a")
    lost = cluster.ask(CheckNode("a"))
    assert isinstance(lost, Refused) and "a is lost" in lost.message


def test_opening_a_node_releases_it_from_quarantine(cluster: Training) -> None:
    cluster.quarantine("a")
    assert isinstance(cluster.intend("a", NodeIntent.OPEN), Accepted)
    assert cluster.standing("a") is Standing.OK
    assert cluster.node("a").record.why.startswith("released by")
    cluster.submit(gpus=1, members=4)
    assert cluster.job("j1").phase is Phase.STARTING


def test_a_cordoned_node_in_quarantine_is_opened_by_one_word(cluster: Training) -> None:
    cluster.quarantine("a")
    cluster.intend("a", NodeIntent.CORDONED)
    cluster.intend("a", NodeIntent.OPEN)
    assert cluster.node("a").schedulable


# -- hangs ---------------------------------------------------------------------------------


def refs(cluster: Training, job_id: str, *numbers: int) -> list[MemberRef]:
    return [MemberRef(job_id, cluster.job(job_id).attempt, number) for number in numbers]


def test_a_hang_stops_the_job_and_dumps_the_stuck_member_alone(cluster: Training) -> None:
    job_id = train(cluster, stop_grace_ms=10_000)
    cluster.walk(job_id, 10)
    cluster.stand(30_000, waiting=refs(cluster, job_id, 0, 1, 3))
    assert cluster.job(job_id).phase is Phase.RUNNING
    cluster.stand(1_000, waiting=refs(cluster, job_id, 0, 1, 3))
    job = cluster.job(job_id)
    assert (job.phase, job.stop_cause) == (Phase.STOPPING, StopCause.HANG)
    assert job.why.endswith("at step 10 (usually 1s a step); member 2 is stuck")
    stops = [command for command in cluster.last.commands if isinstance(command, Stop)]
    assert [stop.ref.member for stop in stops if stop.dump] == [2]
    assert {stop.grace_ms for stop in stops} == {2_000}
    cluster.restart(job_id)
    job = cluster.job(job_id)
    assert (job.phase, job.attempt, job.hangs, job.failures) == (Phase.RUNNING, 2, 1, 0)


def test_who_never_beats_never_hangs(cluster: Training) -> None:
    job_id = train(cluster)
    cluster.stand(100_000)
    assert cluster.job(job_id).phase is Phase.RUNNING


def test_while_a_node_is_out_of_contact_nothing_is_called_a_hang(cluster: Training) -> None:
    job_id = train(cluster)
    cluster.walk(job_id, 10)
    for _ in range(40):
        cluster.wait(1_000)
        cluster.tell("a", "b", "c")
    assert cluster.job(job_id).phase is Phase.RUNNING
    cluster.walk(job_id, 1)
    cluster.stand(30_000)
    assert cluster.job(job_id).phase is Phase.RUNNING
    cluster.stand(70_000)  # it has paused for 40 s before
    assert cluster.events_of(JobStopping)[-1].cause is StopCause.HANG


def test_each_hang_is_waited_for_longer_and_the_third_is_the_last() -> None:
    cluster = Training(policy(silent_after_ms=10_000, hang_after_ms=5_000, hangs_max=3), "a")
    job_id = cluster.run()
    bounds = []
    while job_id not in cluster.finished:
        cluster.walk(job_id, 8)
        began_ms = cluster.now_ms
        while cluster.job(job_id).phase is Phase.RUNNING:
            cluster.stand(1_000)
        bounds.append(cluster.now_ms - began_ms)
        cluster.restart(job_id)
    assert bounds == [21_000, 81_000, 321_000]
    job = cluster.finished[job_id]
    assert (job.outcome, job.code) == (Outcome.FAILED, 124)
    assert job.why.endswith("it hung 3 times, the most the policy allows")


def test_a_job_that_is_never_restarted_ends_with_its_hang(cluster: Training) -> None:
    job_id = train(cluster, members=1, restart="never")
    cluster.walk(job_id, 8)
    cluster.stand(31_000)
    cluster.restart(job_id)
    assert cluster.finished[job_id].outcome is Outcome.FAILED
    assert "restart is never" in cluster.finished[job_id].why


def test_a_controller_that_starts_anew_need_not_see_steps_to_tell_a_hang(
    cluster: Training,
) -> None:
    """What it knew of the pace is gone, but members tell how long they took so far."""
    job_id = train(cluster, members=1)
    cluster.walk(job_id, 50)
    cluster.state.heard.watches.clear()
    cluster.state.agenda.watch_ms = None
    cluster.stand(32_000)
    assert cluster.job(job_id).stop_cause is StopCause.HANG


def test_who_waits_for_a_stuck_peer_does_not_make_the_usual_step_longer(
    cluster: Training,
) -> None:
    """Seeds 2 and 147 of the fuzz: a new controller heard one that waits first."""
    job_id = train(cluster, members=2)
    cluster.walk(job_id, 10)
    cluster.stand(20_000, waiting=refs(cluster, job_id, 0))
    cluster.state.heard.watches.clear()
    cluster.state.agenda.watch_ms = None
    cluster.stand(40_000, waiting=refs(cluster, job_id, 0))
    assert cluster.job(job_id).stop_cause is StopCause.HANG
