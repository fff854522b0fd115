"""Elastic gangs: never smaller than their least nor larger than their most, and good neighbors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobPlaced
from shoal.model.job import Phase, StopCause
from shoal.model.policy import Policy, Preempt
from tests.core.build import Cluster
from tests.core.clockwork import random_history, random_policy
from tests.core.test_preempt import let_stop, stopped

POLICY = Policy(run_ms_min=60_000, move_cost_ms=10**9, silent_after_ms=10**9, grace_ms=10**9)
ELASTIC: dict[str, Any] = {
    "gpus": 1,
    "cpu_milli": 0,
    "members": 1,
    "members_max": 4,
    "checkpoint_ms": 1_000,
}


def cluster_of(*gpus: int, **policy: Any) -> Cluster:
    cluster = Cluster(msgspec.structs.replace(POLICY, **policy))
    for name, count in zip("abcdef", gpus, strict=False):
        cluster.join(name, gpus=count)
    return cluster


def size(cluster: Cluster, job_id: str) -> int:
    return len(cluster.job(job_id).members)


def test_a_gang_starts_as_large_as_there_is_room_for_up_to_its_most() -> None:
    cluster = cluster_of(2, 1)
    assert size(cluster, cluster.run(**ELASTIC)) == 3
    cluster.join("c", gpus=8)
    assert size(cluster, cluster.run(**ELASTIC)) == 4
    assert size(cluster, cluster.run(**{**ELASTIC, "members": 4, "members_max": 0})) == 4


def test_it_waits_only_if_not_even_its_least_fits() -> None:
    cluster = cluster_of(2)
    cluster.run(gpus=1)
    assert size(cluster, cluster.run(**ELASTIC)) == 1
    waits = cluster.submit(**ELASTIC)
    assert cluster.job(waits).phase is Phase.WAITING


def grown(cluster: Cluster, job_id: str) -> int:
    """Its size when enough time has passed for it to grow."""
    cluster.wait(60_000)
    cluster.step()
    cluster.deliver()
    if cluster.job(job_id).phase is Phase.STOPPING:
        let_stop(cluster, job_id)
    return size(cluster, job_id)


def test_it_grows_into_room_that_nobody_wants_and_keeps_its_place_meanwhile() -> None:
    cluster = cluster_of(1)
    job_id = cluster.run(**ELASTIC)
    cluster.join("b", gpus=2)
    assert cluster.last.wake_ms == cluster.now_ms + 60_000  # it is looked at again in time
    assert grown(cluster, job_id) == 3
    job = cluster.job(job_id)
    assert (job.attempt, job.attained_ms, job.failures) == (2, 60_000, 0)
    assert job.members[0].slice.node == "a"


@pytest.mark.parametrize(
    "wish",
    [
        {"checkpoint_ms": 0},
        {"members_max": 1},
        {"restart": "never"},
        {"within": "rack", "within_required": True},
        {"members_per_node": 1},
    ],
)
def test_it_does_not_grow_if_it_would_lose_its_work_or_what_it_insists_on(
    wish: dict[str, Any],
) -> None:
    cluster = cluster_of(1)
    job_id = cluster.run(**{**ELASTIC, **wish})
    cluster.join("b", gpus=4)
    assert grown(cluster, job_id) == 1


def test_it_does_not_grow_while_anybody_waits() -> None:
    cluster = cluster_of(1)
    job_id = cluster.run(**ELASTIC)
    cluster.join("b", gpus=2)
    cluster.run(gpus=1)
    waits = cluster.submit(gpus=2)
    assert cluster.job(waits).phase is Phase.WAITING
    assert grown(cluster, job_id) == 1
    cluster.cancel(waits)
    assert grown(cluster, job_id) == 2


def test_it_grows_when_little_work_would_be_done_twice() -> None:
    cluster = cluster_of(1, run_ms_min=0)
    job_id = cluster.run(**{**ELASTIC, "checkpoint_ms": 600_000})
    cluster.wait(300_000)
    cluster.join("b", gpus=2)
    assert cluster.job(job_id).phase is Phase.RUNNING
    assert cluster.last.wake_ms == cluster.now_ms + 300_000  # when it has saved
    cluster.wait(300_000)
    cluster.step()
    assert cluster.job(job_id).stop_cause is StopCause.RESIZE


@pytest.mark.parametrize("checkpoint_ms", [500, 1_000])
def test_one_that_saves_every_second_or_more_often_grows_too(checkpoint_ms: int) -> None:
    """Looks a second apart would always fall between the same two saves."""
    cluster = cluster_of(1, run_ms_min=0)
    job_id = cluster.run(**{**ELASTIC, "checkpoint_ms": checkpoint_ms})
    cluster.wait(300)
    cluster.join("b", gpus=2)
    for _ in range(10):
        if cluster.job(job_id).phase is Phase.RUNNING:
            assert cluster.last.wake_ms is not None
            cluster.wait(cluster.last.wake_ms - cluster.now_ms)
            cluster.step()
    assert cluster.job(job_id).stop_cause is StopCause.RESIZE


def test_it_shrinks_before_anybody_is_stopped_altogether() -> None:
    cluster = cluster_of(6, run_ms_min=0)
    small = cluster.run(gpus=1, cpu_milli=0, preemptible=True, checkpoint_ms=1)
    wide = cluster.run(**ELASTIC, preemptible=True)
    cluster.run(gpus=1, cpu_milli=0)
    cluster.wait(5_500)
    urgent = cluster.submit(gpus=2, cpu_milli=0, priority=1)
    assert stopped(cluster) == [wide]
    assert cluster.job(wide).stop_cause is StopCause.RESIZE
    let_stop(cluster, wide)
    assert cluster.job(urgent).phase is Phase.STARTING
    assert (size(cluster, wide), cluster.job(wide).phase) == (2, Phase.STARTING)
    assert cluster.job(small).phase is Phase.RUNNING
    assert cluster.job(wide).attained_ms == 5_500


def test_an_unwilling_elastic_job_shrinks_for_nobody() -> None:
    cluster = cluster_of(4, run_ms_min=0)
    cluster.run(**ELASTIC)
    cluster.submit(gpus=2, priority=9)
    assert stopped(cluster) == []


@pytest.mark.parametrize("first", [1_000, pytest.param(1_050, marks=pytest.mark.soak)])
def test_in_no_history_is_a_gang_smaller_than_its_least_or_larger_than_its_most(
    first: int,
) -> None:
    resized = 0
    for seed in range(first, first + 50):
        policy = msgspec.structs.replace(random_policy(seed), preempt=Preempt.PRIORITY)
        cluster = random_history(seed, policy)
        specs = {event.job: event.spec for event in cluster.events_of(JobSubmitted)}
        for event in cluster.events_of(JobPlaced):
            spec = specs[event.job]
            most = max(spec.members, spec.members_max)
            assert spec.members <= len(event.slices) <= most, seed
            resized += spec.members < len(event.slices)
        assert not cluster.state.jobs, seed
    assert resized > 20
