"""Checkpoints on peers: two copies before a snapshot counts, and no byte that is not its own."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.agent.blocks.door import Door
from shoal.agent.blocks.store import Offer
from shoal.agent.keeping import holdings as agent_holdings
from shoal.agent.keeping.contents import scan
from shoal.agent.keeping.copying import Copying
from shoal.agent.keeping.holdings import CannotHold, Holdings, get
from shoal.agent.keeping.keeping import Fetching
from shoal.control.filedesk import FileDesk
from shoal.control.outputs import LIMITS, OutputStore
from shoal.control.placements import Place
from shoal.model.blocks import encode_manifest, peer_of
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.kept import (
    NO_PEER,
    Copied,
    CopyHeld,
    FileAnswer,
    FilePiece,
    FileWanted,
    HoldCopy,
    Kind,
    Snapshot,
    held_key,
)
from shoal.model.policy import Policy
from tests.core.test_roots import cluster_of

KIND = Kind.CHECKPOINT
CONTENT = {"model.pt": random.Random(1).randbytes(5 << 20), "a/small": b"step 7", "empty": b""}
BOUND_MB = 100


class Fabric:
    """A head, and nodes a, b, c with doors. Messages are delivered in order, unless a node is in
    `deaf`. `bytes`: of files that came to the head."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cluster = cluster_of(a="one", b="two", c="three")
        self.job = self.cluster.run(gpus=1)
        self.first = self.cluster.job(self.job).members[0].slice.node
        self.ref = MemberRef(self.job, 1, 0)
        self.doors = {name: Door() for name in "abc"}
        for name in self.doors:
            (root / name).mkdir()
        for door in self.doors.values():
            door.start()
        self.deaf: set[str] = set()
        self.bytes = 0
        self.copied = self.cluster.state.heard.copied
        self.store = OutputStore(root / "head", LIMITS._replace(spare=0))
        tick = SimpleNamespace(state=self.cluster.state, stage=None, copied=self.hear)
        loop: Any = SimpleNamespace(
            tick=tick,
            blocks=SimpleNamespace(peer=self.peer),
            policy=Policy(checkpoint_copy_mb=BOUND_MB, checkpoint_peers=True),
            store=SimpleNamespace(tight=False, job=lambda _: None),
            placements=SimpleNamespace(ask=lambda ref, node, then: then(self.place(ref, node))),
            alarms=SimpleNamespace(raise_=lambda *_: None, clear=lambda _: None),
        )
        self.desk = FileDesk(loop, self.store, self.push)
        self.nodes: dict[str, Holdings] = {}
        for name, door in self.doors.items():
            keeper: Any = SimpleNamespace(offer=door.offer)
            self.nodes[name] = Holdings(root / name / "held", name, keeper, self.say(name))

    def hear(self, copied: Copied) -> None:
        self.copied[copied.job] = copied

    def place(self, ref: MemberRef, node: str) -> Place:
        return Place.NEWEST if node == self.first and ref.job == self.job else Place.NOWHERE

    def peer(self, node: str, key: str, fetcher: str) -> Any:
        return peer_of(node, "127.0.0.1", self.doors[node].at, key, fetcher, int(time.time()))

    def say(self, name: str) -> Callable[[CopyHeld], object]:
        return lambda held: self.desk.take(held, name, lambda _: None)

    def push(self, node: str, answer: FileAnswer) -> bool:
        if node not in self.deaf and answer.hold is not None:
            asyncio.get_running_loop().call_soon(self.nodes[node].take, answer.hold)
        return node not in self.deaf

    def send(self, message: FilePiece | Snapshot) -> bool:
        if isinstance(message, FilePiece):
            self.bytes += len(message.data)
        loop = asyncio.get_running_loop()

        def answer(said: FileAnswer) -> None:
            loop.call_soon_threadsafe(self.copying.take, said)

        self.desk.take(message, self.first, answer)
        return True

    async def save(self, folder: Path, key: bytes | None = None) -> None:
        """Until all of it is kept, wherever that is."""
        self.copying = Copying(self.send, None, lambda _: key, self.nodes[self.first])
        self.copying.watch(self.ref, KIND, str(folder), None, peers="lab")
        self.copying.ended(self.ref)
        await until(lambda: self.copying.complete(self.ref))
        self.copying.forget(self.ref)

    async def fetch(self, node: str, key: bytes | None = None) -> dict[str, bytes]:
        """What a member of the next attempt finds there."""
        ref = MemberRef(self.job, 2, 0)
        launch = Launch(node=node, incarnation=1, ref=ref, argv=("x",), env={}, travels=True)

        def want(wanted: FileWanted) -> None:
            sent = self.store.sent(wanted)
            if not wanted.path:
                index = self.store.index(self.job)
                held = self.desk.holders.wishes(self.job, index, node)
                sent = msgspec.structs.replace(sent, held=held)
            asyncio.get_running_loop().call_soon(fetching.take, sent)

        root = self.root / node / "checkpoints"
        fetching = Fetching(str(root), want, lambda _: key, node)
        await fetching.get(launch, 0)
        assert not list(root.glob(".*.held"))
        return read(root / self.job)

    def holders(self) -> set[str]:
        return {node for copy in self.store.index(self.job).held.values() for node in copy.holders}

    def held(self, node: str) -> list[str]:
        return [name for _, name in self.nodes[node]._copies()]


def read(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def write(folder: Path, content: dict[str, bytes]) -> Path:
    for path, data in content.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    made = Fabric(tmp_path)
    yield made
    made.store.close()
    for door in made.doors.values():
        door.close()


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not fact():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def run(work: Awaitable[None]) -> None:
    async def whole() -> None:
        await work

    asyncio.run(whole())


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_two_nodes_hold_a_snapshot_and_no_byte_of_it_passes_the_head(
    fabric: Fabric, tmp_path: Path, key: bytes | None
) -> None:
    folder = write(tmp_path / "saved", CONTENT)

    async def work() -> None:
        await fabric.save(folder, key)
        holders = fabric.holders()
        assert len(holders) == 2 and fabric.first in holders and not fabric.bytes
        assert fabric.copied[fabric.job].held_by[0] == fabric.first
        (other,) = holders - {fabric.first}
        last = next(iter(set("abc") - holders))
        fabric.doors[fabric.first].close()  # it dies with all it has
        assert await fabric.fetch(last, key) == CONTENT
        peers = [path.read_bytes() for path in (tmp_path / other / "held").rglob("model.pt")]
        assert len(peers) == 1 and (CONTENT["model.pt"][:100] in peers[0]) == (key is None)
        # The next one takes its place everywhere.
        (folder / "model.pt").unlink()
        (folder / "model.pt").write_bytes(b"step 8")
        fabric.doors[fabric.first] = Door()
        fabric.doors[fabric.first].start()
        fabric.nodes[fabric.first]._doors = SimpleNamespace(  # type: ignore[assignment]
            offer=fabric.doors[fabric.first].offer
        )
        await fabric.save(folder, key)
        held = {copy.manifest for copy in fabric.store.index(fabric.job).held.values()}
        await until(lambda: {n for one in "abc" for n in fabric.held(one)} == held)

    run(work())
    size = sum(path.stat().st_size for path in (tmp_path / "head").rglob("*") if path.is_file())
    assert size < 10_000, "manifests only"


def test_a_corrupt_copy_is_refused_by_name_and_taken_elsewhere(
    fabric: Fabric, tmp_path: Path
) -> None:
    folder = write(tmp_path / "saved", CONTENT)

    async def work() -> None:
        await fabric.save(folder)
        (other,) = fabric.holders() - {fabric.first}
        (model,) = (tmp_path / other / "held").rglob("model.pt")
        with model.open("r+b") as file:
            file.write(b"lies")
        last = next(iter(set("abc") - fabric.holders()))
        assert await fabric.fetch(last) == CONTENT
        index = fabric.store.index(fabric.job)
        (wish,) = fabric.desk.holders.wishes(fabric.job, index, last)
        only = tuple(peer for peer in wish.peers if peer.node == other)
        with pytest.raises(CannotHold, match=f"{other} gave a corrupt block 1: refused"):
            get(tmp_path / "x", wish.manifest, only, last, wish.size)
        for change in (
            {"node": other, "key": held_key("j9", wish.manifest)},
            {"ticket": b"x" * 32},
        ):
            forged = msgspec.structs.replace(only[0], **change)
            with pytest.raises(ValueError, match="hangs up"):
                get(tmp_path / "y", wish.manifest, (forged,), last, wish.size)

    run(work())


def test_without_a_node_that_has_room_the_head_is_the_second_holder(
    fabric: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "saved", CONTENT)
    monkeypatch.setattr(agent_holdings, "SPARE_BYTES", 1 << 60)  # every disk is full

    async def work() -> None:
        await fabric.save(folder)
        assert not fabric.holders() and fabric.bytes == sum(map(len, CONTENT.values()))
        last = next(iter(set("abc") - {fabric.first}))
        assert await fabric.fetch(last) == CONTENT

    run(work())


def test_a_node_holds_as_much_of_a_tenant_as_the_bound_says(fabric: Fabric, tmp_path: Path) -> None:
    folder = write(tmp_path / "saved", CONTENT)
    said: list[CopyHeld] = []

    async def work() -> None:
        await fabric.save(folder)
        index = fabric.store.index(fabric.job)
        (other,) = fabric.holders() - {fabric.first}
        (wish,) = fabric.desk.holders.wishes(fabric.job, index, other)
        fabric.nodes[other]._tell = said.append
        key = held_key("j77", wish.manifest)  # another job of the same tenant, and of another one
        (copied,) = (tmp_path / other / "held").glob(f"{fabric.job}/*")
        files, manifest = str(copied / "files"), str(copied / "manifest")
        fabric.doors[fabric.first].offer(Offer(key=key, folder=files, manifest=manifest))
        peers = (fabric.peer(fabric.first, key, other),)
        most = 2 * wish.size
        for tenant, bound in (("default", most - 1), ("x", wish.size - 1), ("default", most)):
            order = HoldCopy("j77", wish.manifest, (), tenant, wish.size, bound, peers)
            fabric.nodes[other].take(order)
            await until(lambda: not fabric.nodes[other]._fetches)

    run(work())
    first, second, third = (one.problem for one in said if one.got is None)
    assert "default has its share of the disk" in first and "x has its share" in second
    assert not third


def test_a_copy_is_made_again_when_its_holder_is_gone_and_liars_change_nothing(
    fabric: Fabric, tmp_path: Path
) -> None:
    folder = write(tmp_path / "saved", CONTENT)

    async def work() -> None:
        await fabric.save(folder)
        (other,) = fabric.holders() - {fabric.first}
        last = next(iter(set("abc") - fabric.holders()))
        before = fabric.store.index(fabric.job)
        (copy,) = before.held.values()
        fabric.say(last)(CopyHeld(fabric.job, copy.manifest))  # nobody asked it
        fabric.say(last)(CopyHeld("j99", "x" * 64))
        manifest, _ = encode_manifest(fabric.store.manifest(fabric.job, copy))
        answers: list[FileAnswer] = []
        files = tuple(before.of[fabric.first])
        for bad in (manifest[:-1], manifest):  # a manifest that lies, and one of another node
            node = fabric.first if bad != manifest else last
            fabric.desk.take(Snapshot(fabric.ref, 1, files, bad), node, answers.append)
        fabric.desk.take(Snapshot(fabric.ref, 1, files[1:], manifest), fabric.first, answers.append)
        assert len([one for one in answers if one.problem and not one.again]) == 3
        assert fabric.store.index(fabric.job) == before
        fabric.cluster.learn_gone(other)
        fabric.deaf.add(other)
        fabric.desk.holders.look()
        await until(lambda: fabric.holders() == {fabric.first, last})
        assert fabric.held(last) == [copy.manifest] and not fabric.bytes
        # Without anybody else, the node itself still has it, and says that it is alone.
        fabric.cluster.learn_gone(last)
        fabric.desk.holders.look()
        (folder / "a/small").unlink()
        asked: list[FileAnswer] = []
        found = scan(folder)
        data = await fabric.nodes[fabric.first].stage(
            fabric.job, "lab", str(folder), found.files, None, None
        )
        listed = tuple(one for one in files if one.path in found.files)
        fabric.desk.take(Snapshot(fabric.ref, 2, listed, data), fabric.first, asked.append)
        assert [one.problem for one in asked] == [NO_PEER]

    run(work())


def test_a_node_that_comes_back_removes_what_no_longer_counts(
    fabric: Fabric, tmp_path: Path
) -> None:
    folder = write(tmp_path / "saved", CONTENT)

    async def work() -> None:
        await fabric.save(folder)
        (other,) = fabric.holders() - {fabric.first}
        fabric.deaf.add(other)
        os.unlink(folder / "empty")
        await fabric.save(folder)
        assert other not in fabric.holders() and fabric.held(other)
        fabric.deaf.clear()
        fabric.nodes[other].recall()
        fabric.nodes[other].reconnected()
        await until(lambda: not list((tmp_path / other / "held").iterdir()))
        last = next(iter(set("abc") - {fabric.first, other}))
        assert fabric.held(last), "those that count stay"
        fabric.nodes[last].reconnected()
        await asyncio.sleep(0)
        assert fabric.held(last)

    run(work())
