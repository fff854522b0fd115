"""The tracker: each block leaves its origin once, and only those who may hear of a block do."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.control import blocks
from shoal.control.blocks import Tracker
from shoal.model.blocks import Door, Seek, Sought
from shoal.model.job import MemberRef

URL = "s3://bucket/set"


class Scene:
    """Nodes with a member each. `asks` answers as the link would."""

    def __init__(self, **tenants: str) -> None:
        self.now_s = 100.0
        state = SimpleNamespace(placed={}, nodes={})
        for number, (node, tenant) in enumerate(tenants.items()):
            spec = SimpleNamespace(tenant=tenant, volumes=(f"{URL}:data",), package="")
            ref = MemberRef("j1", 1, number)
            state.placed[node] = {ref: SimpleNamespace(spec=spec)}
            state.nodes[node] = SimpleNamespace(spec=SimpleNamespace(address=f"10.0.0.{number}"))
        self.state: Any = state
        self.tracker = Tracker(lambda: self.state, lambda: self.now_s)
        for node in tenants:
            self.tracker.opens(node, Door(7000, bytes(32), node.encode()))
        self.heard: dict[str, list[Sought]] = {node: [] for node in tenants}

    def asks(self, node: str, **words: Any) -> list[Sought]:
        """What the node hears at once."""
        (ref,) = self.state.placed[node]
        seek = Seek(ref=ref, source=URL, fingerprint="f", **({"count": 8} | words))
        before = len(self.heard[node])
        self.tracker.seek(seek, node, self.heard[node].append)
        return self.heard[node][before:]


def name(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def got(*numbers: int) -> tuple[tuple[int, bytes], ...]:
    return tuple((number, name(number)) for number in numbers)


def test_each_block_is_read_from_the_origin_once_and_then_comes_from_neighbors() -> None:
    scene = Scene(n1="t", n2="t", n3="t")
    claimed = [scene.asks(node, origin=4, peers=8)[0].origin for node in ("n1", "n2", "n3")]
    assert sorted(one for numbers in claimed for one in numbers) == list(range(8))
    assert claimed[2] == (), "what is claimed is not read twice"
    scene.asks("n1", got=got(*claimed[0]))
    news = [sought for sought in scene.heard["n3"] if sought.blocks]
    assert {block for sought in news for block in sought.blocks} == {
        (number, name(number), ("n1",)) for number in claimed[0]
    }, "it hears of them without asking again"
    assert {peer.node for sought in news for peer in sought.peers} == {"n1"}
    assert news[0].peers[0].address == "10.0.0.0"


def test_a_node_that_dies_loses_what_it_claimed() -> None:
    scene = Scene(n1="t", n2="t")
    assert len(scene.asks("n1", origin=8)[0].origin) == 8
    assert scene.asks("n2", origin=8)[0].origin == ()
    scene.now_s += blocks.CLAIM_S + 1
    assert len(scene.asks("n2", origin=8)[0].origin) == 8
    scene.now_s += blocks.CLAIM_S_MAX + 1
    scene.asks("n2", origin=8)
    assert len(scene.asks("n1", origin=8)[-1].origin) == 0, "n2 got them again just now"
    scene.asks("n2", over=True)
    assert len(scene.heard["n1"][-1].origin) == 8, "who gives up says so"


def test_nodes_that_disagree_about_a_block_are_named_and_both_read_it_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(n1="t", n2="t", n3="t")
    scene.asks("n1", got=got(0, 1), origin=8)
    answers = scene.asks("n2", got=((0, name(99)),))
    assert [sought.again for sought in answers] == [(0,)]
    assert scene.heard["n1"][-1].again == (0,)
    assert "block 0 of s3://bucket/set is not the same on n2 and on n1" in caplog.text
    third = scene.asks("n3", origin=8, peers=8)
    assert 0 not in {block[0] for sought in third for block in sought.blocks}
    assert third[0].origin == (0,), "it reads that one itself"


def test_a_corrupt_block_is_asked_for_elsewhere_and_read_again_if_nobody_else_has_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(n1="t", n2="t")
    scene.asks("n1", got=got(*range(8)))
    assert len(scene.asks("n2", peers=8)[0].blocks) == 8
    answer = scene.asks("n2", peers=1, origin=1, refused=((3, "n1", True),))[0]
    assert answer.origin == (3,)
    assert "n1 has a corrupt block 3 of s3://bucket/set, says n2" in caplog.text


def test_another_tenant_and_a_node_without_such_a_member_hear_and_say_nothing() -> None:
    scene = Scene(n1="t", n2="other")
    scene.asks("n1", got=got(*range(8)))
    assert scene.asks("n2", peers=8)[0].blocks == ()
    scene.state.placed["n3"] = {MemberRef("j9", 1, 0): None}
    seek = Seek(ref=MemberRef("j1", 1, 0), source=URL, fingerprint="f", count=8, peers=8)
    heard: list[Sought] = []
    scene.tracker.seek(seek, "n3", heard.append)
    scene.tracker.seek(msgspec.structs.replace(seek, source="s3://other"), "n1", heard.append)
    assert heard == []


def test_what_lies_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(n1="t", n2="t")
    lies = ((-1, name(0)), (8, name(0)), (1, b"short"))
    scene.asks("n1", got=lies, refused=((99, "n2", True), (1, "nobody", True)), wish=(-5, 99))
    assert scene.asks("n2", peers=8)[0].blocks == ()
    assert scene.asks("n2", count=9)[0].alone, "the same files have one number of blocks"
    assert scene.asks("n2", count=1 << 40) == []
    monkeypatch.setattr(blocks, "SETS_MAX", 1)
    (ref,) = scene.state.placed["n1"]
    other = Seek(ref=ref, source=URL, fingerprint="g", count=8, origin=1)
    scene.tracker.seek(other, "n1", scene.heard["n1"].append)
    assert scene.asks("n1", got=())[0].anew, "the first set was forgotten"


def test_a_block_whose_node_has_no_door_yet_is_told_when_it_opens() -> None:
    scene = Scene(n1="t", n2="t")
    door = scene.tracker.doors.pop("n1")
    scene.asks("n1", got=got(0, 1))
    assert scene.asks("n2", peers=8)[0].blocks == ()
    scene.tracker.opens("n1", door)
    assert {block[0] for block in scene.heard["n2"][-1].blocks} == {0, 1}


def test_what_a_node_was_told_before_its_helper_was_killed_is_told_again() -> None:
    scene = Scene(n1="t", n2="t")
    scene.asks("n1", got=got(*range(4)))
    assert len(scene.asks("n2", peers=8, begins=True)[0].blocks) == 4
    claimed = scene.asks("n2", got=got(1), origin=4)[0].origin
    assert len(claimed) == 4
    assert scene.asks("n2", peers=8, origin=4)[0].blocks == (), "it is fetching them"
    (answer,) = scene.asks("n2", got=got(1), peers=8, origin=4, begins=True)
    assert {number for number, _, _ in answer.blocks} == {0, 2, 3}
    assert set(answer.origin) == set(claimed), "what it was to read is not held back from it"


def test_a_node_whose_members_read_as_it_comes_gets_what_they_wish_and_nothing_else() -> None:
    scene = Scene(n1="t", n2="t")
    (first,) = scene.asks("n1", origin=2, peers=2, wish=(5, 6), only=True)
    assert first.origin == (5, 6) and not first.blocks
    (second,) = scene.asks("n2", origin=2, peers=2, wish=(6, 7), only=True)
    assert second.origin == (7,), "n1 reads 6 already"
    scene.asks("n1", got=got(0, 5, 6), origin=8, peers=8, only=True)
    (news,) = [sought for sought in scene.heard["n2"] if sought.blocks]
    assert [number for number, _, _ in news.blocks] == [6], "it has not wished for 0 and 5"
    scene.asks("n2", got=got(7), origin=8, peers=8, only=True)
    assert all(not sought.blocks for sought in scene.heard["n1"]), "nor has n1 for 7"


def test_what_a_node_had_removed_is_not_believed_to_be_there_when_it_begins_again() -> None:
    scene = Scene(n1="t", n2="t")
    scene.asks("n1", got=got(*range(8)), begins=True)
    scene.asks("n1", over=True)
    (answer,) = scene.asks("n1", begins=True, got=got(3), origin=8, peers=8)
    assert set(answer.origin) == {0, 1, 2, 4, 5, 6, 7}
    (other,) = scene.asks("n2", begins=True, peers=8)
    assert [number for number, _, _ in other.blocks] == [3]
