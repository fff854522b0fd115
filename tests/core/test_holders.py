"""A job that waits for GPUs can say which jobs hold them."""

from __future__ import annotations

from shoal.core.answers.holders import holders_text
from shoal.model.job import Job
from shoal.model.policy import Others
from tests.core.build import Cluster


def every(_: Job) -> bool:
    return True


def test_the_jobs_that_hold_the_gpus_are_named_by_runs_of_their_numbers() -> None:
    cluster = Cluster()
    for name in ("a", "b"):
        cluster.join(name, gpus=4)
    jobs = [cluster.run(gpus=1) for _ in range(8)]
    waiting = cluster.job(cluster.submit(gpus=2))
    assert holders_text(cluster.state, waiting, every) == "8 of 8 GPUs are held by j1-j8"
    for ended in (jobs[1], jobs[4]):
        cluster.end(ended)
    waiting = cluster.job(cluster.submit(gpus=4))
    assert holders_text(cluster.state, waiting, every) == "6 of 8 GPUs are held by j1, j3-j4, j6-j8"


def test_many_holders_are_counted() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=8)
    jobs = [cluster.run(gpus=1, gpu_milli=500, cpu_milli=100) for _ in range(16)]
    for ended in jobs[1::2]:
        cluster.end(ended)
    text = holders_text(cluster.state, cluster.job(cluster.submit(gpus=8)), every)
    assert text.endswith("are held by j1, j3, j5, j7 and 4 other jobs")


def test_nothing_is_said_without_holders_or_a_need_for_gpus() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    assert (
        holders_text(cluster.state, cluster.job(cluster.run(gpus=1, cpu_milli=8_000)), every) == ""
    )
    assert (
        holders_text(cluster.state, cluster.job(cluster.submit(gpus=0, cpu_milli=1_000)), every)
        == ""
    )


def test_jobs_that_the_reader_may_not_see_are_counted_or_named_by_tenant() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    for tenant in ("lab", "lab", "rival", "own"):
        cluster.run(gpus=1, tenant=tenant)
    waiting = cluster.job(cluster.submit(gpus=2, tenant="own"))

    def own(job: Job) -> bool:
        return job.spec.tenant == "own"

    held = "4 of 4 GPUs are held by j4 and jobs of"
    assert holders_text(cluster.state, waiting, own) == f"{held} other tenants"
    assert holders_text(cluster.state, waiting, own, Others.TENANTS) == f"{held} lab, rival"
