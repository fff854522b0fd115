"""Of nodes with the same room, a job gets one whose free GPUs are joined as it needs them."""

from __future__ import annotations

import random

import pytest

from shoal.core.books.grouping import groups_of
from shoal.core.scheduling import fit
from shoal.model.job import Phase
from shoal.model.tree import Tree, TreeGpu
from tests.core.build import Cluster, node_spec

# Two sockets with two switches of two GPUs each.
GPUS = 8
TREE = Tree(tuple(TreeGpu(numa=gpu // 4, switches=(gpu // 2,)) for gpu in range(GPUS)))
WHOLE, SCATTERED = (0, 1, 2, 3), (0, 2, 4, 6)  # free GPUs


def cluster_of(count: int, tree: Tree | None = TREE) -> Cluster:
    cluster = Cluster()
    for number in range(count):
        fields = {} if tree is None else {"tree": tree}
        cluster.join(f"n{number}", gpus=GPUS, cpus=64, memory_mb=10_000, **fields)
    return cluster


def with_free(*free: tuple[int, ...]) -> Cluster:
    """A node for each of these, of which only these GPUs are free."""
    cluster = cluster_of(len(free))
    jobs = [cluster.run(gpus=1) for _ in range(GPUS * len(free))]
    for job in jobs:
        slice_ = cluster.job(job).members[0].slice
        if slice_.gpus[0] in free[int(slice_.node[1:])]:
            cluster.end(job)
    assert [room.free for room in cluster.state.rooms] == list(free)
    return cluster


@pytest.mark.parametrize("first", [True, False])
def test_a_job_that_needs_a_group_gets_a_whole_one_and_one_that_needs_none_leaves_it(
    first: bool,
) -> None:
    free = (WHOLE, SCATTERED) if first else (SCATTERED, WHOLE)
    for gpus, wanted in ((4, WHOLE), (2, WHOLE), (1, SCATTERED)):
        cluster = with_free(*free)
        (member,) = cluster.job(cluster.run(gpus=gpus)).members
        assert member.slice.node == f"n{free.index(wanted)}", (gpus, member)


def test_members_of_a_gang_over_nodes_get_whole_groups_first() -> None:
    cluster = with_free(SCATTERED, WHOLE, SCATTERED, WHOLE)
    job = cluster.job(cluster.run(members=2, gpus=4))
    assert [member.slice.node for member in job.members] == ["n1", "n3"]


def test_nodes_without_a_tree_are_taken_in_join_order_and_nobody_looks_at_their_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "cost", None)
    cluster = cluster_of(3, tree=None)
    jobs = [cluster.run(gpus=gpus) for gpus in (4, 2, 2, 1)]
    assert {cluster.job(job).members[0].slice.node for job in jobs[:3]} == {"n0"}


def joined(monkeypatch: pytest.MonkeyPatch, tried: int) -> tuple[float, float]:
    """Jobs come and go for a while: which shares of those with 4 GPUs got them on one socket, and
    of those with 2, at one switch."""
    monkeypatch.setattr(fit, "EQUALS_TRIED_MAX", tried)
    groups = groups_of(node_spec("n", gpus=GPUS, tree=TREE))
    assert groups is not None
    cluster, rng = cluster_of(6), random.Random("groups")
    together = {2: [0, 0], 4: [0, 0]}
    running: list[str] = []
    for _ in range(600):
        while len(running) > 8 and (len(running) > 24 or rng.random() < 0.5):
            cluster.end(running.pop(rng.randrange(len(running))))
        gpus = rng.choice((1, 1, 1, 2, 2, 4))
        job = cluster.submit(gpus=gpus)
        if cluster.job(job).phase is Phase.WAITING:
            cluster.cancel(job)
            continue
        cluster.deliver()
        (member,) = cluster.job(job).members
        cluster.hear(member.slice.node)
        running.append(job)
        if gpus > 1:
            level = {4: 1, 2: 3}[gpus]  # socket, switch
            near = len({groups[gpu][level] for gpu in member.slice.gpus}) == 1
            together[gpus][0] += near
            together[gpus][1] += 1
    return together[4][0] / together[4][1], together[2][0] / together[2][1]


def test_more_jobs_get_gpus_of_one_group_than_if_equal_nodes_were_taken_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, now = joined(monkeypatch, 1), joined(monkeypatch, 8)
    for what, number in (("on one socket", 0), ("at one switch", 1)):
        print(f"{what}: {before[number]:.0%}, then {now[number]:.0%}")
    assert now[0] > before[0]
    assert now[1] > before[1]
