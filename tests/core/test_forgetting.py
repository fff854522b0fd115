"""Nodes that are gone for good make room for new ones."""

from __future__ import annotations

import pytest
from storm.fuzz import run_seed

from shoal.core.invariants import verify
from shoal.core.phases import observe
from shoal.core.phases.observe import FORGOTTEN_MS
from shoal.core.state.apply_room import drop_node
from shoal.core.state.events import nodes
from shoal.core.state.events.nodes import NodeJoined
from shoal.core.state.load import restore
from shoal.core.state.state import Node, State
from shoal.model.node import JOINED, LabelChange, NodeIntent
from shoal.model.report import SetIntent, SetLabels
from tests.core.build import Cluster


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    for name in ("a", "b"):
        made.join(name, gpus=2, origin=JOINED)
    return made


def same_when_loaded(cluster: Cluster) -> None:
    verify(cluster.state)
    again = restore(cluster.state.snapshot())
    verify(again)
    assert [node.id for node in again.order] == [node.id for node in cluster.state.order]
    assert list(again.nodes) == list(cluster.state.nodes)
    assert again.capacity == {k: n for k, n in cluster.state.capacity.items() if n}


def test_a_new_node_takes_the_place_of_one_that_is_gone_for_a_month(cluster: Cluster) -> None:
    cluster.learn_gone("a")
    cluster.wait(FORGOTTEN_MS - 1)
    cluster.hear("b")
    cluster.join("c", gpus=4, origin=JOINED)
    assert list(cluster.state.nodes) == ["a", "b", "c"], "not yet"
    cluster.wait(1)
    cluster.hear("b", "c")
    cluster.join("d", gpus=8, origin=JOINED)
    assert list(cluster.state.nodes) == ["b", "c", "d"]
    assert [node.id for node in cluster.state.order] == ["d", "b", "c"]
    [joined] = [e for e in cluster.log if isinstance(e, NodeJoined) and e.node == "d"]
    assert joined.why == "new node with 8 GPUs, 8 CPUs, 1000 MB; a, gone for 30d, is forgotten"
    same_when_loaded(cluster)
    job = cluster.run(gpus=8)
    assert cluster.job(job).members[0].slice.node == "d"
    cluster.join("a", gpus=2, origin=JOINED)
    assert cluster.state.nodes["a"].index == 3, "it is a new node like any other"
    same_when_loaded(cluster)


def test_machines_that_come_and_go_take_no_more_room_than_so_many(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "GONE_MAX", 5)
    for number in range(40):
        cluster.join(f"m{number}", gpus=1, origin=JOINED)
        cluster.learn_gone(f"m{number}")
    assert len(cluster.state.order) == 2 + 5 + 1
    assert len(cluster.state.heard.said) <= 2 + 5 + 1
    same_when_loaded(cluster)


def test_a_new_node_looks_only_at_those_that_are_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look at all of them at each of 12,500 joins took half a minute."""
    looked: list[str] = []
    real = observe._gone

    def counted(state: State, node: Node) -> bool:
        looked.append(node.id)
        return real(state, node)

    monkeypatch.setattr(observe, "_gone", counted)
    for number in range(20):
        cluster.join(f"m{number}", gpus=1, origin=JOINED)
    assert looked == []
    cluster.learn_gone("a")
    cluster.join("last", gpus=1, origin=JOINED)
    assert looked == ["a"]
    same_when_loaded(cluster)


def test_what_somebody_needs_is_not_forgotten(cluster: Cluster) -> None:
    """A node that a live job remembers, that was set or labeled by people, or is our own."""
    cluster.join("own", gpus=0)
    for name in ("c", "d"):
        cluster.join(name, gpus=0, origin=JOINED)
    cluster.ask(SetIntent("c", NodeIntent.DRAINING))
    cluster.ask(SetLabels("d", LabelChange(labels={"pool": "x"})))
    job = cluster.run(gpus=2, members=2)
    for name in ("a", "c", "d", "own"):
        cluster.learn_gone(name)
    cluster.wait(2 * FORGOTTEN_MS)
    cluster.join("e", gpus=0, origin=JOINED)
    assert cluster.job(job).members
    assert {"a", "c", "d", "own"} <= cluster.state.nodes.keys()
    cluster.ask(SetIntent("c", NodeIntent.REMOVED))
    cluster.join("f", gpus=0, origin=JOINED)
    assert "c" not in cluster.state.nodes
    same_when_loaded(cluster)


def test_a_storm_in_which_nodes_are_forgotten_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else happens meanwhile. The last of these forgets eight."""
    monkeypatch.setattr(observe, "FORGOTTEN_MS", 20_000)
    monkeypatch.setattr(observe, "GONE_MAX", 0)
    forgotten: list[str] = []

    def drop(state: State, name: str) -> int:
        forgotten.append(name)
        return drop_node(state, name)

    monkeypatch.setattr(nodes, "drop_node", drop)
    for seed in (9200022, 9200029, 9200036):
        run_seed(seed)
    assert forgotten
