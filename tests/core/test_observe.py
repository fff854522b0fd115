"""What nodes say, and what may be believed of it."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.state.apply import apply
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.state.expect import ran_ms
from shoal.model.commands import Acknowledge, Stop
from shoal.model.job import MemberRef, Outcome, Phase
from shoal.model.node import NodeHealth, NodeIntent
from shoal.model.policy import Policy
from tests.core.build import POLICY, Cluster, kinds, node_spec


def stops(cluster: Cluster) -> list[MemberRef]:
    """Who is to be stopped; nothing else may have been ordered."""
    assert all(isinstance(command, Stop) for command in cluster.last.commands)
    return [command.ref for command in cluster.last.commands if isinstance(command, Stop)]


def test_a_new_node_joins_and_is_ready_at_once() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    assert kinds(cluster.last.events) == ["NodeJoined", "NodeReady"]
    assert cluster.node("a").schedulable


def test_a_node_with_something_alive_that_nobody_knows_is_not_ready_until_that_is_gone() -> None:
    cluster = Cluster()
    stranger = MemberRef("j9", 1, 0)
    old = Cluster()
    old.join("a", gpus=1)
    old.state.next_job = 9
    old.submit(gpus=1)
    old.deliver()
    cluster.books["a"] = old.books["a"]

    cluster.hear("a")
    assert cluster.node("a").health is NodeHealth.JOINING
    assert stops(cluster) == [stranger]

    waiting = cluster.submit(gpus=1)
    assert cluster.job(waiting).phase is Phase.WAITING

    cluster.books["a"].exited(stranger, 143)
    cluster.hear("a")
    assert cluster.node("a").health is NodeHealth.READY
    assert cluster.job(waiting).phase is Phase.STARTING


def test_a_gang_runs_when_all_of_it_has_been_seen_alive_and_not_before() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.join("b", gpus=1)
    job_id = cluster.submit(gpus=1, members=2)
    cluster.deliver()
    assert kinds(cluster.hear("a").events) == ["MembersStarted"]
    assert cluster.job(job_id).phase is Phase.STARTING
    assert kinds(cluster.hear("b").events) == ["JobRunning"]


def test_a_gang_that_lost_a_member_is_not_said_to_run_when_the_rest_turns_up() -> None:
    """Found by simulation: a node restarted in the very round in which the others reported."""
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.join("b", gpus=1)
    job_id = cluster.submit(gpus=1, members=2)
    cluster.deliver("a")
    cluster.reboot("b")
    cluster.hear("b", "a")
    assert "JobRunning" not in kinds(cluster.log)
    assert cluster.job(job_id).phase is Phase.STOPPING


# -- what is old ---------------------------------------------------------------------------


def test_a_report_older_than_the_last_one_is_not_believed() -> None:
    cluster = Cluster()
    cluster.join("a")
    before_launch = cluster.books["a"].report()
    job_id = cluster.run()
    stale = cluster.hear_reports(before_launch)
    assert (stale.events, stale.commands) == ([], [])
    assert cluster.job(job_id).phase is Phase.RUNNING


def test_a_report_that_comes_twice_counts_once() -> None:
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.submit()
    cluster.deliver()
    cluster.exit(job_id)
    report = cluster.books["a"].report()
    cluster.hear_reports(report, report)
    assert kinds(cluster.last.events).count("MemberExited") == 1


def test_an_earlier_life_of_a_node_is_not_believed() -> None:
    cluster = Cluster()
    cluster.join("a")
    last_words = cluster.books["a"].report()
    cluster.reboot("a")
    cluster.hear("a")
    assert cluster.hear_reports(last_words).events == []


def test_a_dead_life_never_speaks_again_but_the_next_one_does() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.learn_gone("a")
    assert cluster.hear("a").events == []
    assert cluster.node("a").health is NodeHealth.LOST
    cluster.reboot("a")
    assert kinds(cluster.hear("a").events) == ["NodeJoined", "NodeReady"]


def test_an_old_report_does_not_call_back_a_node_that_was_given_up() -> None:
    """Found by simulation: forgetting a lost node's last word let copies of older ones in."""
    cluster = Cluster()
    cluster.join("a")
    old = cluster.books["a"].report()
    cluster.hear("a")
    cluster.wait(60_000)
    cluster.step()
    assert cluster.node("a").health is NodeHealth.LOST
    assert cluster.hear_reports(old).events == []
    assert kinds(cluster.hear("a").events) == ["NodeJoined", "NodeReady"]


def test_news_of_a_death_that_is_out_of_date_changes_nothing() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.reboot("a")
    cluster.hear("a")
    cluster.books["a"].incarnation -= 1
    assert cluster.learn_gone("a").events == []
    assert cluster.node("a").health is NodeHealth.READY


# -- silence and death ---------------------------------------------------------------------


def test_a_silent_node_keeps_its_jobs_until_the_grace_time_is_over() -> None:
    cluster = Cluster(Policy(silent_after_ms=5_000, grace_ms=60_000))
    cluster.join("a")
    job_id = cluster.run()
    cluster.wait(4_999)
    assert cluster.step().events == []
    cluster.wait(1)
    assert kinds(cluster.step().events) == ["NodeSilent"]
    assert not cluster.node("a").schedulable
    cluster.wait(54_999)
    assert cluster.step().events == []
    assert cluster.job(job_id).phase is Phase.RUNNING
    cluster.wait(1)
    assert kinds(cluster.step().events) == ["NodeLost", "JobRequeued"]


def test_a_silent_node_that_is_heard_again_goes_on_as_if_nothing_had_been() -> None:
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.run()
    cluster.wait(5_000)
    cluster.step()
    assert kinds(cluster.hear("a").events) == ["NodeReady"]
    assert cluster.job(job_id).attempt == 1
    assert cluster.last.commands == []


def test_a_node_known_to_be_dead_is_lost_at_once() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.join("b")
    job_id = cluster.run()
    gone = cluster.learn_gone("a")
    assert kinds(gone.events) == ["NodeLost", "JobRequeued", "JobPlaced"]
    assert cluster.job(job_id).members[0].slice.node == "b"


def test_a_node_that_restarts_faster_than_any_timeout_has_lost_what_ran_on_it() -> None:
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.run()
    cluster.reboot("a")
    events = kinds(cluster.hear("a").events)
    assert events == ["NodeLost", "NodeJoined", "NodeReady", "JobRequeued", "JobPlaced"]
    assert cluster.job(job_id).attempt == 2


def test_a_node_may_come_back_with_other_hardware() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    cluster.reboot("a", node_spec("a", gpus=2))
    cluster.hear("a")
    assert cluster.node("a").spec.gpus == 2
    waiting = cluster.submit(gpus=2, members=1)
    assert cluster.job(waiting).members[0].slice.gpus == (0, 1)


def test_a_restarted_controller_gives_every_node_its_full_time_to_be_heard() -> None:
    cluster = Cluster(Policy(silent_after_ms=5_000, grace_ms=60_000))
    cluster.join("a")
    cluster.wait(100_000)
    apply(cluster.state, ControllerStarted(at_ms=cluster.now_ms, epoch=2))
    assert cluster.step().events == []
    cluster.wait(5_000)
    assert kinds(cluster.step().events) == ["NodeSilent"]


def test_a_member_that_vanishes_from_the_inventory_is_lost() -> None:
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.run()
    cluster.books["a"].alive.clear()
    assert kinds(cluster.hear("a").events)[:2] == ["MemberLost", "JobRequeued"]
    assert cluster.job(job_id).losses == 1


def test_a_member_not_yet_started_is_not_taken_for_one_that_vanished() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.submit()
    launch_again = cluster.hear("a")
    assert launch_again.events == []
    assert [type(command).__name__ for command in launch_again.commands] == ["Launch"]


# -- adoption ------------------------------------------------------------------------------


@pytest.fixture
def given_up() -> tuple[Cluster, str]:
    """A job runs on the only node, whose silence lasted longer than the grace period."""
    cluster = Cluster()
    cluster.join("a", gpus=2)
    job_id = cluster.run(gpus=1, members=2)
    cluster.wait(60_000)
    cluster.step()
    assert cluster.job(job_id).phase is Phase.WAITING
    return cluster, job_id


def test_a_job_given_up_with_its_node_and_found_alive_there_goes_on(
    given_up: tuple[Cluster, str],
) -> None:
    cluster, job_id = given_up
    cluster.hear("a")
    assert kinds(cluster.last.events) == ["NodeJoined", "JobAdopted", "NodeReady"]
    assert cluster.last.commands == []
    job = cluster.job(job_id)
    assert (job.phase, job.attempt) == (Phase.RUNNING, 1)


def test_a_job_that_ended_while_nobody_could_hear_it_is_not_run_again(
    given_up: tuple[Cluster, str],
) -> None:
    cluster, job_id = given_up
    cluster.exit(job_id, member=0)
    cluster.exit(job_id, member=1)
    cluster.hear("a")
    assert cluster.finished[job_id].outcome is Outcome.SUCCEEDED
    assert cluster.finished[job_id].attempt == 1


def test_a_job_that_was_placed_elsewhere_meanwhile_is_stopped_where_it_was_given_up() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    job_id = cluster.run(gpus=1)
    cluster.wait(60_000)
    cluster.join("b", gpus=1)
    assert cluster.job(job_id).members[0].slice.node == "b"
    cluster.hear("a")
    assert [str(ref) for ref in stops(cluster)] == ["j1.1.0"]
    assert cluster.node("a").health is NodeHealth.JOINING


def test_part_of_a_gang_is_not_adopted(given_up: tuple[Cluster, str]) -> None:
    cluster, job_id = given_up
    del cluster.books["a"].alive[MemberRef(job_id, 1, 1)]
    cluster.hear("a")
    assert "JobAdopted" not in kinds(cluster.log)
    assert cluster.job(job_id).phase is Phase.WAITING


def test_a_job_adopted_on_a_node_that_was_set_to_drain_meanwhile_moves_away(
    given_up: tuple[Cluster, str],
) -> None:
    cluster, job_id = given_up
    cluster.intend("a", NodeIntent.DRAINING)
    cluster.hear("a")
    assert kinds(cluster.last.events)[-1] == "JobStopping"
    assert cluster.job(job_id).phase is Phase.STOPPING


def test_what_ended_by_our_own_order_while_out_of_contact_is_no_failure_of_the_job() -> None:
    """Found by simulation: drained, then silent, then adopted with the code of our own SIGTERM."""
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.run()
    cluster.intend("a", NodeIntent.DRAINING)
    cluster.deliver()
    cluster.wait(60_000)
    cluster.step()
    cluster.exit(job_id, code=143)
    cluster.hear("a")
    assert "JobAdopted" not in kinds(cluster.log)
    assert cluster.job(job_id).phase is Phase.WAITING
    assert cluster.job(job_id).failures == 0


def test_a_member_stopped_by_an_order_out_of_date_is_lost_and_has_not_failed() -> None:
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.run()
    ref = MemberRef(job_id, 1, 0)
    cluster.books["a"].stopping[ref] = None
    assert kinds(cluster.end(job_id, code=143).events)[:2] == ["MemberLost", "JobRequeued"]
    assert cluster.job(job_id).failures == 0


def test_a_job_is_not_adopted_where_its_slices_are_held_by_another() -> None:
    """If an order to start one came late, two waiting jobs may turn up on the same GPU."""
    cluster = Cluster()
    cluster.join("a", gpus=1)
    first = cluster.submit(gpus=1)
    late = cluster.last.commands
    cluster.wait(60_000)
    cluster.step()
    second = cluster.submit(gpus=1, priority=1)
    cluster.hear("a")
    assert cluster.job(second).phase is Phase.STARTING
    launch_second = cluster.last.commands
    cluster.send("a", late)
    cluster.books["a"].exited(MemberRef(first, 1, 0), 0)
    cluster.send("a", launch_second)
    cluster.wait(60_000)
    cluster.step()

    cluster.hear("a")
    assert cluster.finished[first].outcome is Outcome.SUCCEEDED
    assert cluster.job(second).phase is Phase.WAITING


def test_the_work_of_a_job_that_is_adopted_is_counted_once() -> None:
    """Found by reading: what had been kept when its node was given up was added to its run."""
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.run(checkpoint_ms=1_000)
    cluster.wait(POLICY.grace_ms)
    cluster.step()
    assert cluster.job(job_id).attained_ms == POLICY.grace_ms
    cluster.hear("a")
    assert cluster.job(job_id).phase is Phase.RUNNING
    assert ran_ms(cluster.job(job_id), cluster.now_ms) == POLICY.grace_ms


def ended_unheard() -> tuple[Cluster, str, str]:
    """One job ended on a node before anybody heard of it, another was still running there."""
    cluster = Cluster()
    cluster.join("a", gpus=2)
    done, cut = cluster.submit(gpus=1), cluster.submit(gpus=1)
    cluster.deliver()
    cluster.hear("a")
    cluster.books["a"].exited(MemberRef(done, 1, 0), 0)
    return cluster, done, cut


def test_a_job_that_ended_before_its_node_died_does_not_run_again() -> None:
    cluster, done, cut = ended_unheard()
    cluster.reboot("a")
    cluster.hear("a")
    assert cluster.job(done).outcome is Outcome.SUCCEEDED
    assert cluster.job(cut).losses == 1 and cluster.job(cut).attempt == 2
    acknowledged = [c.ref for c in cluster.last.commands if isinstance(c, Acknowledge)]
    assert acknowledged == [MemberRef(done, 1, 0)]


def test_who_saw_the_node_die_also_tells_what_had_ended_there() -> None:
    cluster, done, cut = ended_unheard()
    cluster.join("b", gpus=2)
    cluster.learn_gone("a")
    assert cluster.job(done).outcome is Outcome.SUCCEEDED
    assert [member.slice.node for member in cluster.job(cut).members] == ["b"]


def test_a_job_that_was_given_up_and_had_ended_is_over_when_its_node_is_back() -> None:
    cluster, done, _ = ended_unheard()
    cluster.wait(POLICY.grace_ms)
    cluster.step()
    assert cluster.job(done).phase is Phase.WAITING
    cluster.reboot("a")
    cluster.hear("a")
    assert cluster.job(done).outcome is Outcome.SUCCEEDED and cluster.job(done).attempt == 1


def test_what_was_stopped_by_an_order_out_of_date_is_lost_with_its_node_all_the_same() -> None:
    cluster, done, _ = ended_unheard()
    ref = MemberRef(done, 1, 0)
    exit_ = cluster.books["a"].exits[ref]
    cluster.books["a"].exits[ref] = msgspec.structs.replace(exit_, stopped=True)
    cluster.reboot("a")
    cluster.hear("a")
    assert cluster.job(done).attempt == 2 and cluster.job(done).losses == 1
