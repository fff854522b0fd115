"""A job goes on where its checkpoints are seen; elsewhere it says that it starts over."""

from __future__ import annotations

import msgspec

from shoal.core.scheduling.roots import copying, travels
from shoal.core.state.events.runs import JobPlaced
from shoal.model.kept import Copied
from shoal.model.policy import Policy
from tests.core.build import Cluster
from tests.core.training import Training


def cluster_of(**roots: str) -> Training:
    cluster = Training(nodes="".join(roots), gpus=1)
    for name, root in roots.items():
        book = cluster.books[name]
        book.spec = msgspec.structs.replace(book.spec, checkpoints=root)
        cluster.reboot(name)
    cluster.hear(*roots)
    assert {n.id: n.spec.checkpoints for n in cluster.state.order} == roots
    return cluster


def lose(cluster: Training, job: str) -> JobPlaced:
    """Its node dies, and it is placed again."""
    node = cluster.job(job).members[0].slice.node
    cluster.learn_gone(node)
    cluster.deliver()
    cluster.hear(*(name for name in cluster.books if name != node))
    return [e for e in cluster.log if isinstance(e, JobPlaced) and e.job == job][-1]


def test_it_goes_where_its_checkpoints_are_seen_though_others_are_free() -> None:
    cluster = cluster_of(a="one", b="two", c="one", d="two")
    job = cluster.run(gpus=1, checkpoint_ms=1_000)
    first = cluster.job(job).members[0].slice.node
    same = {"a": "c", "c": "a", "b": "d", "d": "b"}[first]
    placed = lose(cluster, job)
    assert (placed.attempt, placed.slices[0].node) == (2, same)
    assert "starts over" not in placed.why


def test_it_says_that_it_starts_over_where_nobody_else_sees_them() -> None:
    cluster = cluster_of(a="one", b="two")
    job = cluster.run(gpus=1, checkpoint_ms=1_000)
    first = cluster.job(job).members[0].slice.node
    placed = lose(cluster, job)
    other = {"a": "b", "b": "a"}[first]
    assert (
        f"its checkpoints are on {first}, and {other} cannot see them: it starts over" in placed.why
    )


def test_nothing_is_said_of_who_saves_nothing_or_keeps_its_own_place() -> None:
    for fields in ({}, {"checkpoint_ms": 1_000, "env": {"SHOAL_CHECKPOINT_DIR": "/nfs/me"}}):
        cluster = cluster_of(a="one", b="two")
        job = cluster.run(gpus=1, **fields)
        assert "starts over" not in lose(cluster, job).why


def test_a_root_that_is_not_known_is_trusted() -> None:
    cluster = Cluster()
    for name in "ab":
        cluster.join(name, gpus=1)
    job = cluster.run(gpus=1, checkpoint_ms=1_000)
    cluster.learn_gone(cluster.job(job).members[0].slice.node)
    cluster.deliver()
    assert not any("starts over" in e.why for e in cluster.log if isinstance(e, JobPlaced))


def test_it_says_which_checkpoint_it_gets_from_the_head_and_what_was_lost() -> None:
    cluster = cluster_of(a="one", b="two")
    job = cluster.run(gpus=1, checkpoint_ms=1_000)
    cluster.state.heard.copied[job] = Copied(job, 1, 40, 0)
    cluster.job(job).saved_step = 60
    first = cluster.job(job).members[0].slice.node
    placed = lose(cluster, job)
    other = {"a": "b", "b": "a"}[first]
    assert f"{other} gets its checkpoint of step 40 from the head" in placed.why
    assert f"step 60 was saved on {first} and not copied in time" in placed.why
    assert "starts over" not in placed.why


def test_a_launch_travels_only_where_nodes_have_several_places_and_the_policy_lets_it() -> None:
    for roots, most, expected in (
        ({"a": "one", "b": "two"}, 1, True),
        ({"a": "one", "b": "one"}, 1, False),
        ({"a": "one", "b": "two"}, 0, False),
    ):
        cluster = cluster_of(**roots)
        job = cluster.run(gpus=1)
        cluster.state.policy = Policy(checkpoint_copy_mb=most)
        assert travels(cluster.state, cluster.job(job)) is expected
        assert copying(cluster.state, cluster.job(job)) == {0}
