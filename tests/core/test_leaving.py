"""A node that wants to leave is emptied, removed and let go; or goes at once, and is removed."""

from __future__ import annotations

from shoal.model.commands import Dismiss
from shoal.model.job import Phase
from shoal.model.node import NodeHealth, NodeIntent
from tests.core.build import Cluster, kinds


def leaving_cluster(**job: object) -> tuple[Cluster, str]:
    """Two nodes; the one with the job on it wants to leave. Returns the job and where it runs."""
    cluster = Cluster()
    cluster.join("a", gpus=1)
    job_id = cluster.run(gpus=1, **job)
    cluster.join("b", gpus=1)
    cluster.books["a"].leaving = True
    return cluster, job_id


def dismissed(cluster: Cluster) -> list[str]:
    return [command.node for command in cluster.last.commands if isinstance(command, Dismiss)]


def test_an_empty_node_is_removed_at_once_and_told_until_it_is_gone() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.books["a"].leaving = True
    assert kinds(cluster.hear("a").events) == ["NodeIntended", "NodeIntended"]
    assert cluster.node("a").intent is NodeIntent.REMOVED
    assert dismissed(cluster) == ["a"]
    cluster.hear("a")  # the order was lost
    assert dismissed(cluster) == ["a"]
    (order,) = cluster.deliver()
    assert isinstance(order, Dismiss)
    cluster.learn_gone("a")
    assert cluster.node("a").health is NodeHealth.LOST
    assert cluster.node("a").intent is NodeIntent.REMOVED


def test_its_jobs_move_away_first() -> None:
    cluster, job_id = leaving_cluster()
    cluster.hear("a")
    assert cluster.node("a").intent is NodeIntent.DRAINING
    assert cluster.job(job_id).phase is Phase.STOPPING
    assert dismissed(cluster) == []
    cluster.deliver()
    cluster.exit(job_id, 143)
    cluster.hear("a")
    assert dismissed(cluster) == []  # its exit is not acknowledged yet
    cluster.deliver()
    cluster.hear("a")
    assert dismissed(cluster) == ["a"]
    assert cluster.job(job_id).members[0].slice.node == "b"


def test_a_job_that_may_not_restart_is_waited_for() -> None:
    cluster, job_id = leaving_cluster(restart="never")
    cluster.hear("a")
    assert cluster.job(job_id).phase is Phase.RUNNING
    assert dismissed(cluster) == []
    cluster.exit(job_id, 0)
    cluster.hear("a")
    cluster.deliver()
    cluster.hear("a")
    assert dismissed(cluster) == ["a"]


def test_nothing_new_starts_on_it() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.books["a"].leaving = True
    cluster.hear("a")
    assert cluster.job(cluster.submit(gpus=1)).phase is Phase.WAITING


def test_one_that_goes_with_jobs_on_it_is_removed_and_its_jobs_are_healed() -> None:
    cluster, job_id = leaving_cluster()
    cluster.hear("a")
    cluster.learn_gone("a")
    assert cluster.node("a").intent is NodeIntent.REMOVED
    cluster.hear("b")
    assert cluster.job(job_id).members[0].slice.node == "b"


def test_one_that_was_drained_before_it_wanted_to_leave_is_removed_too() -> None:
    cluster, _ = leaving_cluster(restart="never")
    cluster.intend("a", NodeIntent.DRAINING)
    cluster.hear("a")
    cluster.learn_gone("a")
    assert cluster.node("a").intent is NodeIntent.REMOVED


def test_one_that_changes_its_mind_is_open_again() -> None:
    cluster, _ = leaving_cluster(restart="never")
    cluster.hear("a")
    cluster.books["a"].leaving = False
    cluster.hear("a")
    assert cluster.node("a").schedulable


def test_one_that_comes_back_is_open_again() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.books["a"].leaving = True
    cluster.hear("a")
    cluster.learn_gone("a")
    cluster.reboot("a")
    cluster.hear("a")
    assert cluster.node("a").schedulable


def test_a_node_is_not_dismissed_while_it_holds_anything() -> None:
    """An order that was overtaken by a start must not end what was started."""
    cluster, _ = leaving_cluster()
    book = cluster.books["a"]
    assert cluster.send("a", [Dismiss(node="a", incarnation=book.incarnation)]) == []
