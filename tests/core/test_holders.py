"""A job that waits for GPUs can say which jobs hold them."""

from __future__ import annotations

from shoal.core.answers.holders import holders_text
from tests.core.build import Cluster


def test_the_jobs_that_hold_the_gpus_are_named_by_runs_of_their_numbers() -> None:
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.join(name, gpus=4)
    jobs = [cluster.run(gpus=1) for _ in range(8)]
    waiting = cluster.job(cluster.submit(gpus=2))
    assert holders_text(cluster.state, waiting) == "8 of 8 GPUs are held by j1-j8"
    for ended in (jobs[1], jobs[4]):
        cluster.end(ended)
    waiting = cluster.job(cluster.submit(gpus=4))
    assert holders_text(cluster.state, waiting) == "6 of 8 GPUs are held by j1, j3-j4, j6-j8"


def test_many_holders_are_counted() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=8)
    jobs = [cluster.run(gpus=1, gpu_milli=500, cpu_milli=100) for _ in range(16)]
    for ended in jobs[1::2]:
        cluster.end(ended)
    text = holders_text(cluster.state, cluster.job(cluster.submit(gpus=8)))
    assert text.endswith("are held by j1, j3, j5, j7 and 4 other jobs")


def test_nothing_is_said_without_holders_or_a_need_for_gpus() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    assert holders_text(cluster.state, cluster.job(cluster.run(gpus=1, cpu_milli=8_000))) == ""
    assert holders_text(cluster.state, cluster.job(cluster.submit(gpus=0, cpu_milli=1_000))) == ""
