"""A log that rolls back to a backup: the nodes obey, and no number is given out a second time."""

from __future__ import annotations

import pytest

from shoal.core.state.apply import replay
from shoal.core.state.events.cluster import ClusterRestored, ControllerStarted
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.state import State
from shoal.model.commands import Stop
from shoal.model.job import MemberRef, Phase
from shoal.model.node import NodeIntent
from tests.core.build import Cluster

RESTORED = ClusterRestored(
    at_ms=90_000, saved_ms=2_000, epoch=1_000, first_job=5_000, first_attempt=40, first_order=30
)


# The same of a controller that finds out that its log has lost events.
LOST = ControllerStarted(
    at_ms=90_000, epoch=1_000, first_job=5_000, first_attempt=40, first_order=30
)


def went_back(how: ClusterRestored | ControllerStarted = RESTORED) -> tuple[Cluster, str, str]:
    """A job that lives since before the backup, on node a; after the backup it moves to b, and a
    second job starts on a. Then the log goes back, and the nodes are as they are."""
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.join("b", gpus=1)
    old = cluster.run(gpus=1)
    (slice_,) = cluster.state.jobs[old].members
    kept = len(cluster.log)
    for _ in range(3):  # controllers that start after the backup: nodes see higher epochs
        cluster.controller.load()
        cluster.controller.begin(cluster.now_ms)
    cluster.intend(slice_.slice.node, NodeIntent.DRAINING)
    cluster.deliver()
    cluster.end(old, 143)
    cluster.deliver()
    (moved,) = cluster.state.jobs[old].members
    assert moved.slice.node != slice_.slice.node
    cluster.hear(moved.slice.node)
    cluster.intend(slice_.slice.node, NodeIntent.OPEN)
    new = cluster.run(gpus=1)
    assert all(len(book.alive) == 1 for book in cluster.books.values())

    del cluster.log[kept:]
    cluster.log.append(how)
    cluster.now_ms = RESTORED.at_ms
    cluster.controller.load()
    cluster.controller.begin(cluster.now_ms)
    return cluster, old, new


@pytest.mark.parametrize("how", [RESTORED, LOST])
def test_members_that_the_restored_log_does_not_know_are_stopped_and_their_names_never_come_again(
    how: ClusterRestored | ControllerStarted,
) -> None:
    cluster, old, new = went_back(how)
    known = {ref for book in cluster.books.values() for ref in book.alive}
    assert known == {MemberRef(old, 2, 0), MemberRef(new, 1, 0)}
    cluster.hear("a", "b")
    done = cluster.deliver()
    assert {one.ref for one in done if isinstance(one, Stop)} == known, "an obeyed epoch"
    fresh = cluster.submit(gpus=1)
    assert fresh == "j5000"
    for book in cluster.books.values():
        for ref in list(book.alive):
            book.exited(ref, 143)
    for _ in range(3):
        cluster.hear("a", "b")
        cluster.deliver()
    placed = [e for e in cluster.log if isinstance(e, JobPlaced) and e.at_ms >= RESTORED.at_ms]
    assert {(one.job, one.attempt) for one in placed} == {(old, 40), (fresh, 1)}
    assert {ref for book in cluster.books.values() for ref in book.alive} == {
        MemberRef(old, 40, 0),
        MemberRef(fresh, 1, 0),
    }


def test_a_job_that_runs_on_since_before_the_backup_is_left_alone() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    old = cluster.run(gpus=1)
    cluster.log.append(RESTORED)
    cluster.now_ms = RESTORED.at_ms
    cluster.controller.load()
    cluster.controller.begin(cluster.now_ms)
    cluster.hear("a")
    assert cluster.deliver() == []
    assert cluster.state.jobs[old].phase is Phase.RUNNING
    assert cluster.state.jobs[old].attempt == 1


def test_orders_and_epochs_go_on_behind_those_that_were_given_out() -> None:
    state = replay(State(), [RESTORED])
    assert (state.epoch, state.next_job, state.next_order) == (1_000, 5_000, 30)
