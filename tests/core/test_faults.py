"""A node that can run nothing is to blame itself: its jobs go elsewhere, at no cost to them."""

from __future__ import annotations

import pytest

from shoal.core.answers.why import explain
from shoal.core.state.events.runs import JobRunning, MemberLost
from shoal.model.health import Standing
from shoal.model.job import Fault, Job, MemberRef, Outcome, Phase
from shoal.model.node import NodeIntent
from shoal.model.reason import render
from tests.core.build import Cluster

FULL = "cannot start: [Errno 28] No space left on device"


def cluster_of(*names: str) -> Cluster:
    cluster = Cluster()
    for name in names:
        cluster.join(name, gpus=1)
    return cluster


def cannot_start(cluster: Cluster, job: Job, fault: Fault, why: str = FULL, member: int = 0) -> str:
    """The order arrives, and the node says that it cannot; returns which node."""
    cluster.deliver()
    node = job.members[member].slice.node
    ref = MemberRef(job.id, job.attempt, member)
    cluster.books[node].exited(ref, 127, why, fault=fault)
    cluster.hear(node)
    return node


@pytest.mark.parametrize("restart", ["never", "on-node-loss", "on-failure"])
def test_what_a_full_disk_kept_from_starting_starts_elsewhere(restart: str) -> None:
    """Even a job that must never be restarted: it has not run yet."""
    cluster = cluster_of("a", "b")
    job = cluster.job(cluster.submit(gpus=1, restart=restart))
    sick = cannot_start(cluster, job, Fault.START)
    assert (job.attempt, job.phase, job.failures) == (2, Phase.STARTING, 0)
    assert job.members[0].slice.node != sick
    record = cluster.state.nodes[sick].record
    assert (record.standing, record.faulty) == (Standing.QUARANTINED, True)
    assert "No space left" in record.why
    assert not any(isinstance(event, JobRunning) for event in cluster.log)


def test_every_node_of_a_full_disk_is_closed_and_jobs_wait_with_the_reason() -> None:
    """What nodes say of themselves is no guess: the share that may be in quarantine is no bound."""
    cluster = cluster_of("a", "b")
    job = cluster.job(cluster.submit(gpus=1))
    cannot_start(cluster, job, Fault.START)
    cannot_start(cluster, job, Fault.START)
    assert (job.phase, job.failures, job.losses) == (Phase.WAITING, 0, 2)
    assert "No space left on device" in render(
        explain(cluster.state, job, cluster.policy, cluster.now_ms)
    )


def test_a_gang_loses_the_member_that_could_not_start_and_is_placed_again() -> None:
    cluster = cluster_of("a", "b", "c")
    job = cluster.job(cluster.submit(gpus=1, members=2))
    sick = cannot_start(cluster, job, Fault.START, member=1)
    assert job.phase is Phase.STOPPING
    cluster.deliver()
    cluster.exit(job.id, 143)
    cluster.hear(job.members[0].slice.node)
    assert (job.attempt, job.failures) == (2, 0)
    assert sick not in {member.slice.node for member in job.members}


def test_a_failure_on_a_disk_that_is_full_is_the_disks_but_not_for_ever() -> None:
    """Else a job that fills disks would close one node after the other."""
    cluster = cluster_of(*"abcdef")
    job_id = cluster.run(gpus=1)
    job = cluster.job(job_id)
    for attempt in range(1, 4):
        assert job.attempt == attempt
        cannot_start(cluster, job, Fault.SICK, "the disk of the node is full")
        cluster.deliver()
    assert job.attempt == 4
    cannot_start(cluster, job, Fault.SICK, "the disk of the node is full")
    assert job.outcome is Outcome.FAILED


def test_a_sleeper_that_its_node_could_not_wake_runs_again_without_a_retry_but_not_for_ever() -> (
    None
):
    cluster = cluster_of("a")
    job = cluster.job(cluster.run(gpus=1))
    for attempt in range(1, 4):
        assert (job.attempt, job.failures) == (attempt, 0)
        cannot_start(cluster, job, Fault.WAKE, "it could not be woken: the driver has failed")
        cluster.deliver()
    lost = [event for event in cluster.log if isinstance(event, MemberLost)]
    assert lost[0].why == "it ended on a (it could not be woken: the driver has failed)"
    assert cluster.state.nodes["a"].record.standing is Standing.OK
    cannot_start(cluster, job, Fault.WAKE, "it could not be woken: the driver has failed")
    assert job.outcome is Outcome.FAILED


def test_a_program_that_is_missing_is_looked_for_on_one_more_node() -> None:
    cluster = cluster_of("a", "b", "c")
    job = cluster.job(cluster.submit(gpus=1))
    first = cannot_start(cluster, job, Fault.MISSING, "no program 'trian' in PATH on this node")
    assert (job.attempt, job.failures) == (2, 0)
    assert job.members[0].slice.node != first
    assert cluster.state.nodes[first].record.standing is Standing.OK, "a typo closes no node"
    cannot_start(cluster, job, Fault.MISSING, "no program 'trian' in PATH on this node")
    assert (job.outcome, job.code) == (Outcome.FAILED, 127)
    assert "trian" in job.why


def test_a_program_that_is_missing_is_tried_again_when_the_other_nodes_are_removed() -> None:
    """It would wait forever for a node that never comes back."""
    cluster = cluster_of("a", "b")
    cluster.run(gpus=1, restart="never")
    job = cluster.job(cluster.submit(gpus=1))
    cannot_start(cluster, job, Fault.MISSING, "no program")
    assert job.phase is Phase.WAITING
    other = next(iter({"a", "b"} - set(job.missing_on)))
    assert "is missing" in render(explain(cluster.state, job, cluster.policy, cluster.now_ms))
    cluster.end(next(iter(cluster.state.jobs)), code=1)
    cluster.learn_gone(other)
    cluster.intend(other, NodeIntent.REMOVED)
    cannot_start(cluster, job, Fault.MISSING, "no program")
    assert (job.outcome, job.code) == (Outcome.FAILED, 127)


def test_with_one_node_what_is_missing_is_missing() -> None:
    cluster = cluster_of("a")
    job = cluster.job(cluster.submit(gpus=1))
    cannot_start(cluster, job, Fault.MISSING, "no program")
    assert job.outcome is Outcome.FAILED
    assert not any(isinstance(event, MemberLost) for event in cluster.log)


def test_a_gang_of_which_one_could_not_start_is_not_said_to_run() -> None:
    cluster = cluster_of("a", "b")
    job = cluster.job(cluster.submit(gpus=1, members=2))
    cluster.deliver()
    books = [cluster.books[member.slice.node] for member in job.members]
    books[0].exited(MemberRef(job.id, 1, 0), 127, "no program", fault=Fault.MISSING)
    cluster.hear_reports(*(book.report() for book in books))
    assert not any(isinstance(event, JobRunning) for event in cluster.log)
    assert job.phase is Phase.STOPPING


def test_a_job_waits_for_a_node_that_has_what_it_needs() -> None:
    """The node without it is always free, for nothing runs there: it must not swallow the queue."""
    cluster = cluster_of("a", "b")
    cluster.run(gpus=1)
    job = cluster.job(cluster.submit(gpus=1))
    bare = cannot_start(cluster, job, Fault.MISSING, "no program")
    assert job.phase is Phase.WAITING
    assert f"only on {bare}" in render(explain(cluster.state, job, cluster.policy, cluster.now_ms))
    other = cluster.job(cluster.submit(gpus=1))
    assert other.members[0].slice.node == bare, "those behind it may well run there"
    cluster.end("j1")
    assert job.members[0].slice.node != bare


def test_jobs_of_two_owners_that_ran_well_elsewhere_speak_against_a_bare_node() -> None:
    cluster = cluster_of("a", "b")
    for owner in ("ann", "bob"):
        job = cluster.job(cluster.submit(gpus=1, user=owner))
        bare = cannot_start(cluster, job, Fault.MISSING, "no program")
        cluster.deliver()
        cluster.hear(job.members[0].slice.node)
        cluster.end(job.id)
    assert cluster.state.nodes[bare].record.standing is Standing.QUARANTINED
