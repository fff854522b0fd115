"""Why a job waits: one true sentence with the numbers in it."""

from __future__ import annotations

from shoal.core.answers.why import explain
from shoal.model.job import MemberRef
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy
from shoal.model.reason import render
from tests.core.build import Cluster


def why(cluster: Cluster, job_id: str) -> str:
    return render(explain(cluster.state, cluster.job(job_id), cluster.policy, cluster.now_ms))


def test_there_is_no_node_yet() -> None:
    cluster = Cluster()
    assert why(cluster, cluster.submit()) == "no node has joined the cluster yet"


def test_there_is_room_for_some_members_but_not_for_all() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    cluster.run(gpus=3)
    job_id = cluster.submit(gpus=1, members=4)
    assert why(cluster, job_id) == (
        "needs 4 members with 1 GPU, 1 CPU each; there is room for 1 now"
    )


def test_there_is_room_for_none() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4, cpus=8, memory_mb=500)
    cluster.run(gpus=3, cpu_milli=2500)
    assert why(cluster, cluster.submit(gpus=2, cpu_milli=0)) == (
        "no node has 2 GPUs free: the emptiest has 1 GPU, 5.5 CPUs, 500 MB"
    )


def test_what_is_short_is_named_first_also_if_there_is_none() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=2, cpus=16, memory_mb=500)
    cluster.run(gpus=2, cpu_milli=2000)
    assert why(cluster, cluster.submit(gpus=1, cpu_milli=1000)) == (
        "no node has 1 GPU, 1 CPU free: the emptiest has 0 GPUs, 14 CPUs, 500 MB"
    )
    assert why(cluster, cluster.submit(cpu_milli=15_000)) == (
        "no node has 15 CPUs free: the emptiest has 14 CPUs, 500 MB"
    )


def test_the_nodes_that_could_hold_it_are_closed() -> None:
    cluster = Cluster()
    for name in ("a", "b", "c"):
        cluster.join(name, gpus=2)
    cluster.intend("a", NodeIntent.CORDONED)
    cluster.learn_gone("b")
    assert why(cluster, cluster.submit(gpus=2, members=3)) == (
        "needs 3 members with 2 GPUs, 1 CPU each; even when empty, the open nodes hold only 1"
        "; a is cordoned, b is lost"
    )


def test_a_retry_waits_for_its_backoff() -> None:
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.run(restart="on-failure", retries=2, backoff_ms=4_000)
    cluster.end(job_id, code=1)
    cluster.wait(1_500)
    assert why(cluster, job_id).startswith("retries in 2.5s: it exited 1; retry 1")


def test_somebody_may_ask_between_the_time_of_a_retry_and_the_step_that_makes_it() -> None:
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.run(restart="on-failure", retries=2, backoff_ms=4_000)
    cluster.end(job_id, code=1)
    job = cluster.job(job_id)
    later_ms = job.not_before_ms + 1
    assert (
        render(explain(cluster.state, job, cluster.policy, later_ms))
        == "it is next in line to start"
    )


def test_the_queue_is_held_for_a_job_that_has_waited_too_long() -> None:
    cluster = Cluster(Policy(patience_ms=3_000))
    cluster.join("a", gpus=2)
    cluster.run(gpus=1)
    cluster.submit(gpus=2, name="train")
    cluster.wait(3_000)
    job_id = cluster.submit(gpus=1)
    assert why(cluster, job_id) == (
        "the queue is held for j2 (train), which is ahead of it and has waited 3s"
    )


def test_a_job_that_does_not_wait_is_explained_by_the_last_decision_about_it() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.wait(700)
    assert why(cluster, cluster.submit()) == ("best fit on a; started at once")


def test_it_is_placed_and_its_code_is_on_the_way() -> None:
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.join(name)
    job_id = cluster.submit(members=2, members_per_node=1, package="0" * 64)
    cluster.deliver()
    placed = why(cluster, job_id)
    for number, member in enumerate(cluster.job(job_id).members):
        ref = MemberRef(job_id, 1, number)
        cluster.books[member.slice.node].gets(ref, "fetches its working directory: 1.0 of 2.0 MB")
    cluster.hear("a", "b")
    first = cluster.job(job_id).members[0].slice.node
    assert why(cluster, job_id) == (
        f"{first} fetches its working directory: 1.0 of 2.0 MB; 1 other node too"
    )
    for number, member in enumerate(cluster.job(job_id).members):
        cluster.books[member.slice.node].begins(MemberRef(job_id, 1, number))
    cluster.hear("a", "b")
    assert why(cluster, job_id) == placed
