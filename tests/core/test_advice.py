"""What is said to help a waiting job is true: so changed, it would start."""

from __future__ import annotations

import pytest

from shoal.core.answers.advice import advise
from shoal.model.node import NodeIntent
from shoal.model.report import SetIntent
from tests.core.build import Cluster


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.join("a", gpus=4)
    made.join("b", gpus=4)
    made.run(gpus=3)
    made.run(gpus=3)
    return made


def advice(cluster: Cluster, **fields: object) -> list[str]:
    job_id = cluster.submit(**fields)
    return advise(cluster.state, cluster.job(job_id), cluster.now_ms)


def test_the_least_change_of_each_kind_is_told(cluster: Cluster) -> None:
    assert advice(cluster, members=2, gpus=4) == [
        "with 1 GPU per member instead of 4 it would start now",
    ]
    assert advice(cluster, members=4, gpus=1) == [
        "with 2 members instead of 4 it would start now",
    ]


def test_nothing_is_told_where_nothing_small_helps(cluster: Cluster) -> None:
    cluster.run(gpus=1)
    cluster.run(gpus=1)
    assert advice(cluster, gpus=2) == []


def test_a_closed_node_with_room_is_named(cluster: Cluster) -> None:
    cluster.join("c", gpus=4)
    cluster.ask(SetIntent("c", NodeIntent.CORDONED))
    assert advice(cluster, gpus=4)[-1] == "c would have room: shoal uncordon c"
