"""Nodes that could take a member's place are warm before they have to."""

from __future__ import annotations

from shoal.core.nodebook import PREPARED_MAX
from shoal.core.phases.prepare import HEARD_MS
from shoal.model.commands import Prepare
from shoal.model.job import MemberRef
from shoal.model.progress import Beat, Progress
from tests.core.build import Cluster


def told(cluster: Cluster) -> list[tuple[str, str]]:
    return [(c.node, c.job) for c in cluster.last.commands if isinstance(c, Prepare)]


def beat(cluster: Cluster, job: str, step: int = 7) -> None:
    """The gang's first member tells of its steps."""
    node = cluster.job(job).members[0].slice.node
    ref = MemberRef(job, cluster.job(job).attempt, 0)
    said = Progress(ref, Beat(ref=str(ref), step=step, steps=step), 0)
    cluster.hear_reports(cluster.books[node].report((said,)))


def gang(cluster: Cluster, nodes: int, members: int = 2, **fields: object) -> str:
    for number in range(1, nodes + 1):
        cluster.join(f"n{number}", cpus=1)
    return cluster.run(members=members, cpu_milli=1000, retries=3, **fields)


def others(cluster: Cluster, job: str) -> list[str]:
    used = {member.slice.node for member in cluster.job(job).members}
    return [name for name in cluster.books if name not in used]


def test_two_nodes_with_room_are_told_of_a_gang_that_counts_steps() -> None:
    cluster = Cluster()
    job = gang(cluster, nodes=6)
    free = others(cluster, job)
    cluster.hear(*free)
    assert told(cluster) == [], "nobody knows yet whether it trains"
    beat(cluster, job)
    cluster.hear(*cluster.books)
    assert told(cluster) == [(node, job) for node in free[:2]]
    cluster.deliver()
    cluster.hear(*cluster.books)
    assert told(cluster) == [], "their reports name the job now"


def test_a_node_that_is_full_or_not_heard_any_more_is_replaced() -> None:
    cluster = Cluster()
    job = gang(cluster, nodes=6)
    free = others(cluster, job)
    beat(cluster, job)
    cluster.hear(*free)
    cluster.deliver()
    cluster.hear(free[0])
    cluster.wait(HEARD_MS + 1)
    cluster.hear(free[0])  # of the other nothing was heard
    cluster.hear(*free[2:])
    assert told(cluster) == [(free[2], job)]


def test_a_gang_that_loses_a_node_goes_to_the_one_that_is_warm() -> None:
    cluster = Cluster()
    job = gang(cluster, nodes=6)
    free = others(cluster, job)
    beat(cluster, job)
    cluster.hear(free[-1])
    assert told(cluster) == [(free[-1], job)]
    cluster.deliver()
    cluster.hear(free[-1])
    lost = cluster.job(job).members[1].slice.node
    kept = cluster.job(job).members[0].slice.node
    cluster.learn_gone(lost)
    for order in cluster.deliver(kept):
        cluster.books[kept].exited(order.ref, 143)  # type: ignore[union-attr]
    cluster.hear(kept)
    assert [member.slice.node for member in cluster.job(job).members] == [kept, free[-1]]


def test_a_node_is_warm_for_few_jobs_and_for_none_that_never_restarts() -> None:
    cluster = Cluster()
    cluster.join("n1", cpus=2)
    jobs = [cluster.run(cpu_milli=500, retries=1) for _ in range(3)]
    never = cluster.run(cpu_milli=500, restart="never")
    cluster.join("n2", cpus=2)
    for job in (never, *jobs):
        beat(cluster, job)
    cluster.hear("n2")
    assert told(cluster) == [("n2", job) for job in jobs[:PREPARED_MAX]]
