"""Silent nodes are ended, where the engine can, before their jobs run elsewhere."""

from __future__ import annotations

from shoal.core.phases.observe import FENCE_MS
from shoal.model.commands import Fence
from shoal.model.job import Phase
from shoal.model.node import NodeHealth
from tests.core.build import Cluster


def silent_cluster(*, fences: bool) -> tuple[Cluster, str]:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    job_id = cluster.run(gpus=1)
    cluster.join("b", gpus=1)
    for _ in range(2):  # b is heard of all the time
        cluster.wait(cluster.policy.grace_ms // 2)
        cluster.step(nodes=(cluster.books["b"].report(),), fences=fences)
    return cluster, job_id


def test_a_job_waits_until_its_silent_node_is_known_to_be_gone() -> None:
    cluster, job_id = silent_cluster(fences=True)
    assert cluster.last.commands == [Fence(node="a", incarnation=1)]
    assert cluster.state.nodes["a"].health is NodeHealth.SILENT
    assert cluster.job(job_id).phase is Phase.RUNNING
    cluster.learn_gone("a")
    assert cluster.state.nodes["a"].dead
    assert cluster.job(job_id).members[0].slice.node == "b"


def test_a_node_that_cannot_be_ended_is_given_up_a_moment_later() -> None:
    cluster, job_id = silent_cluster(fences=True)
    assert cluster.last.wake_ms is not None
    assert cluster.last.wake_ms <= cluster.now_ms + FENCE_MS
    cluster.wait(FENCE_MS)
    cluster.step(nodes=(cluster.books["b"].report(),), fences=True)
    assert cluster.state.nodes["a"].health is NodeHealth.LOST
    assert cluster.job(job_id).members[0].slice.node == "b"


def test_an_engine_that_cannot_end_nodes_is_not_waited_for() -> None:
    cluster, job_id = silent_cluster(fences=False)
    assert cluster.state.nodes["a"].health is NodeHealth.LOST
    assert cluster.job(job_id).members[0].slice.node == "b"
