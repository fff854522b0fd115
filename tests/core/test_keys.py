"""Keys of nodes and join tokens: never two nodes under one name, and what is gone has no key."""

from __future__ import annotations

import msgspec
import pytest

from shoal.core.features import identity as keys_phase
from shoal.core.invariants import Violation, verify
from shoal.core.state.events.identity import KeyRemoved
from shoal.core.state.load import restore
from shoal.core.state.state import Snapshot
from shoal.model.identity import NodeKey, order_key_id
from shoal.model.node import JOINED, NodeIntent, NodeSpec
from shoal.model.report import (
    Accepted,
    Answer,
    Cancel,
    NodeGone,
    NodeReport,
    Refused,
    RemoveKey,
    SetIntent,
    SetKey,
)
from shoal.model.supply import OrderPhase
from tests.core.build import Cluster
from tests.core.supplier import Pool, supply

HASH = "a" * 64


def key(name: str, node: str = "n1", until_ms: int = 0) -> NodeKey:
    return NodeKey(id=name * 8, hash=HASH, node=node, until_ms=until_ms)


def spec(origin: str = JOINED) -> NodeSpec:
    return NodeSpec(id="n1", cpu_milli=1000, memory_mb=1024, address="10.0.0.7", origin=origin)


def joined(origin: str = JOINED) -> Cluster:
    """n1 is there as its incarnation 5, with the key aaaaaaaa."""
    cluster = Cluster()
    assert isinstance(cluster.ask(SetKey(key("a"))), Accepted)
    cluster.step(nodes=(NodeReport(spec=spec(origin), incarnation=5, sequence=1),))
    return cluster


def held(cluster: Cluster) -> list[str]:
    return sorted(key.id for key in cluster.state.identity.keys.values())


def refused(answer: Answer) -> Refused:
    assert isinstance(answer, Refused), answer
    return answer


def test_a_name_whose_node_is_there_is_not_given_to_another_machine() -> None:
    cluster = joined()
    # 5: a machine that tried to join under this name in the same second has the same number.
    lives = [SetKey(key("b"), life) for life in (0, 4, 5, 6)]
    for request in (*lives, SetKey(key("b"), 0, "bbbbbbbb")):
        answer = refused(cluster.ask(request))
        assert answer.field == "name"
        assert (
            answer.message == "n1 is taken by the machine at 10.0.0.7; choose another with --name"
        )
    assert held(cluster) == ["a" * 8]


def test_a_machine_that_was_the_node_gets_another_key_and_its_old_one_is_void() -> None:
    cluster = joined()
    assert isinstance(cluster.ask(SetKey(key("b"), 0, "a" * 8)), Accepted)
    assert held(cluster) == ["b" * 8]


@pytest.mark.parametrize("life", [5, 6])
def test_a_machine_whose_key_was_removed_joins_again_though_its_agent_has_restarted(
    life: int,
) -> None:
    cluster = joined()
    assert isinstance(cluster.ask(SetKey(key("b"), 6)), Refused)  # its key would show who it is
    cluster.ask(RemoveKey("a" * 8))
    assert isinstance(cluster.ask(SetKey(key("b"))), Refused)
    assert isinstance(cluster.ask(SetKey(key("b"), life)), Accepted)


def test_a_key_that_was_never_used_is_replaced() -> None:
    cluster = Cluster()
    for name in ("a", "b"):
        assert isinstance(cluster.ask(SetKey(key(name))), Accepted)
    assert held(cluster) == ["b" * 8]


def test_a_node_that_is_gone_leaves_its_name_to_another_machine() -> None:
    cluster = joined()
    cluster.step(gone=(NodeGone("n1", 5, "its machine died"),))
    assert held(cluster) == ["a" * 8]  # it may come back
    assert isinstance(cluster.ask(SetKey(key("b"))), Accepted)
    assert held(cluster) == ["b" * 8]


def test_the_heads_own_nodes_are_never_given_away() -> None:
    cluster = joined(origin="")
    answer = refused(cluster.ask(SetKey(key("b"), 5, "a" * 8)))
    assert answer.message.startswith("n1 is taken by one of the head's own nodes")


def test_a_removed_node_has_no_key_and_may_join_again() -> None:
    cluster = joined()
    cluster.ask(SetIntent("n1", NodeIntent.REMOVED))
    assert held(cluster) == []
    assert isinstance(cluster.ask(SetKey(key("b"))), Accepted)


def test_a_node_that_leaves_keeps_its_key_until_it_is_gone() -> None:
    cluster = joined()
    leaving = NodeReport(spec=spec(), incarnation=5, sequence=2, leaving=True)
    cluster.step(nodes=(leaving,))
    assert cluster.state.nodes["n1"].intent is NodeIntent.REMOVED
    assert held(cluster) == ["a" * 8]
    assert isinstance(cluster.ask(SetKey(key("b"))), Refused)
    events = cluster.step(gone=(NodeGone("n1", 5, "it has ended"),)).events
    assert held(cluster) == []
    removed = [event for event in events if isinstance(event, KeyRemoved)]
    assert [event.why for event in removed] == ["n1 is no longer part of the cluster"]


def test_a_join_token_can_be_replaced_and_removed_but_does_not_replace_a_nodes_key() -> None:
    cluster = joined()
    token = NodeKey(id="t" * 8, hash=HASH)
    other = NodeKey(id="t" * 8, hash="b" * 64)
    for request in (SetKey(token), SetKey(other)):
        assert isinstance(cluster.ask(request), Accepted)
    assert cluster.state.identity.keys["t" * 8].hash == "b" * 64
    assert refused(cluster.ask(SetKey(NodeKey(id="a" * 8, hash=HASH)))).field == "key"
    assert refused(cluster.ask(SetKey(key("t")))).field == "key"
    assert isinstance(cluster.ask(RemoveKey("t" * 8)), Accepted)
    assert refused(cluster.ask(RemoveKey("t" * 8))).missing
    assert held(cluster) == ["a" * 8]


def test_a_key_that_has_already_ended_is_refused() -> None:
    cluster = joined()
    assert refused(cluster.ask(SetKey(key("t", node="", until_ms=1)))).field == "expires"


def test_there_is_a_bound_on_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_phase, "KEYS_MAX", 1)
    monkeypatch.setattr(keys_phase, "JOIN_TOKENS_MAX", 0)
    cluster = joined()
    assert "the maximum" in refused(cluster.ask(SetKey(key("b", node="n2")))).message
    assert "the maximum" in refused(cluster.ask(SetKey(key("t", node="")))).message
    assert isinstance(cluster.ask(SetKey(key("b"), 0, "a" * 8)), Accepted)  # it replaces its own


def test_when_keys_are_used_up_the_oldest_that_was_never_used_is_void(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys_phase, "KEYS_MAX", 3)
    cluster = joined()
    for name, node in (("b", "n2"), ("c", "n3"), ("d", "n4")):
        assert isinstance(cluster.ask(SetKey(key(name, node=node))), Accepted)
    assert held(cluster) == ["a" * 8, "c" * 8, "d" * 8]


def test_keys_survive_a_snapshot_and_two_for_one_node_are_a_violation() -> None:
    cluster = joined()
    data = msgspec.json.encode(cluster.state.snapshot())
    state = restore(msgspec.json.decode(data, type=Snapshot))
    assert state.identity.keys == cluster.state.identity.keys
    verify(state)
    state.identity.keys["b" * 8] = key("b")
    with pytest.raises(Violation, match="n1 has two keys"):
        verify(state)


# -- join tokens of orders -------------------------------------------------------------------------


def order_token(order: str = "o1") -> NodeKey:
    return NodeKey(id=order_key_id(order), hash=HASH, order=order)


def ordered(lot: int = 1) -> Pool:
    """Order o1 is at its supplier, with a join token of its own."""
    pool = Pool(supply(lot=lot, most=lot))
    pool.submit(gpus=8, members=lot)
    assert isinstance(pool.cluster.ask(SetKey(order_token())), Accepted)
    return pool


def with_token(node: str, order: str = "o1") -> SetKey:
    return SetKey(key("b", node), order=order)


def test_the_token_of_an_order_lets_each_of_its_nodes_in_until_it_has_come() -> None:
    pool = ordered(lot=2)
    ask = pool.cluster.ask
    assert isinstance(ask(with_token("gpu-1")), Accepted)
    again = SetKey(msgspec.structs.replace(key("c"), node="gpu-1"), order="o1")
    assert isinstance(ask(again), Accepted)  # an answer was lost on its way
    pool.is_("o1", OrderPhase.RUNNING)
    pool.look()
    pool.cluster.bring(pool.specs("o1")[0])
    assert "was used: gpu-1 has joined" in refused(ask(with_token("gpu-1"))).message
    assert "not a node of order o1" in refused(ask(with_token("gpu-3"))).message
    assert isinstance(ask(with_token("gpu-2")), Accepted)
    pool.cluster.bring(pool.specs("o1")[1])
    pool.look()
    assert order_key_id("o1") not in pool.cluster.state.identity.keys
    verify(pool.cluster.state)


def test_a_node_that_is_lost_does_not_open_the_token_of_its_order_again() -> None:
    pool = ordered()
    pool.bring("o1")
    pool.cluster.step(gone=(NodeGone("gpu-1", 1, "power"),))
    assert isinstance(refused(pool.cluster.ask(with_token("gpu-1"))), Refused)


def test_the_token_of_an_order_goes_with_it() -> None:
    pool = ordered()
    pool.is_("o1", OrderPhase.ENDED, "Refused", failed=True)
    pool.look()
    assert order_key_id("o1") not in pool.cluster.state.identity.keys
    assert "which is over" in refused(pool.cluster.ask(with_token("gpu-1"))).message
    assert "which is over" in refused(pool.cluster.ask(SetKey(order_token()))).message
    verify(pool.cluster.state)


def test_an_order_that_is_given_back_lets_no_machine_in() -> None:
    pool = ordered()
    pool.look()
    pool.cluster.ask(Cancel("j1"))
    pool.wait(40_000)
    assert "o1" in pool.released or pool.cluster.state.orders["o1"].release
    assert "which is over" in refused(pool.cluster.ask(with_token("gpu-1"))).message


def test_tokens_of_orders_do_not_use_up_those_of_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_phase, "JOIN_TOKENS_MAX", 1)
    pool = ordered()
    assert isinstance(pool.cluster.ask(SetKey(NodeKey(id="t" * 8, hash=HASH))), Accepted)


def test_a_token_that_outlives_its_order_is_noticed() -> None:
    pool = ordered()
    pool.cluster.state.identity.keys["x"] = order_token("o9")
    with pytest.raises(Violation, match="the join token of order o9 has outlived it"):
        verify(pool.cluster.state)
