"""A large package on several nodes: each block leaves the head once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.agent import packages as packages_module
from shoal.agent.blocks.doorkeeper import Doorkeeper
from shoal.agent.packages import Packages, Purpose
from shoal.control.blocks import Tracker
from shoal.link.wire import PIECE_BYTES
from shoal.model.blocks import BLOCK_BYTES, Seek
from shoal.model.job import MemberRef
from shoal.model.report import PackagePiece
from tests.agent.test_packages import package
from tests.agent.test_url_sharing import until

SHA, DATA = package(3 * BLOCK_BYTES + 5, "hello")
PIECES = -(-len(DATA) // PIECE_BYTES)


class Scene:
    """Nodes with a member of the same job, and the head: its tracker and its pieces."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.state: Any = SimpleNamespace(placed={}, nodes={})
        self.tracker = Tracker(lambda: self.state)
        self.lies = False  # once
        self.given: list[int] = []
        self.held_back = False
        self.keepers: list[Doorkeeper] = []

    def node(self, name: str, *, member: bool = True) -> Packages:
        folder = self._root / name
        folder.mkdir()
        keeper = Doorkeeper(folder, lambda door: self.tracker.opens(name, door))
        self.keepers.append(keeper)
        loop = asyncio.get_running_loop()

        def need(sha: str, offset: int) -> None:
            if offset and self.held_back:
                return
            self.given.append(offset)
            data = DATA[offset : offset + PIECE_BYTES]
            if self.lies and offset:
                self.lies, data = False, b"?" * len(data)
            loop.call_soon(made.take, PackagePiece(sha, offset, data, len(DATA)))

        def seek(one: Seek) -> None:
            loop.call_soon(self.tracker.seek, one, name, made.found)

        made = Packages(folder / "packages", need, set)
        made.name, made.seek, made.offer = name, seek, keeper.offer
        spec = SimpleNamespace(tenant="t", volumes=(), package=SHA if member else "")
        self.state.placed[name] = {self.ref(name): SimpleNamespace(spec=spec)}
        self.state.nodes[name] = SimpleNamespace(spec=SimpleNamespace(address="127.0.0.1"))
        return made

    @staticmethod
    def ref(name: str) -> MemberRef:
        return MemberRef("j1", 1, int(name[1:]))

    async def get(self, node: Packages) -> str:
        found = await node.get(SHA, Purpose(self.ref(node.name)))
        return await asyncio.to_thread((found / "sub/code").read_text)


@contextlib.asynccontextmanager
async def scene(root: Path) -> AsyncIterator[Scene]:
    made = Scene(root)
    try:
        yield made
    finally:
        for keeper in made.keepers:
            if (door := keeper.close()) is not None:
                await asyncio.to_thread(door.wait)


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages_module, "SHARED_BYTES_MIN", BLOCK_BYTES)


def test_nodes_that_fetch_a_package_at_once_read_it_from_the_head_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path) as here:
            nodes = [here.node(f"n{number}") for number in range(3)]
            here.held_back = True  # until all of them are there
            coming = [asyncio.create_task(here.get(node)) for node in nodes]
            await until(lambda: len(here.tracker.doors) == 3)
            here.held_back = False
            for node in nodes:
                node.ask_again(all_of_them=True)
            assert await asyncio.gather(*coming) == ["hello"] * 3
            sizes = len(nodes)  # each asked for the first piece, to learn the size
            assert len(here.given) <= PIECES + sizes
            late = here.node("n3")
            assert await here.get(late) == "hello"
            assert len(here.given) <= PIECES + sizes + 1, "neighbors have all of it"

    asyncio.run(story())


def test_what_does_not_have_the_hash_of_the_package_comes_from_the_head_alone(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with scene(tmp_path) as here:
            here.lies = True  # as if a node had passed something else off
            assert await here.get(here.node("n0")) == "hello"
            again = here.given[PIECES + 1 :]
            assert again == [PIECE_BYTES * number for number in range(PIECES)], "not in blocks"
            assert not list((tmp_path / "n0" / "packages").glob("*.blocks"))

    asyncio.run(story())


def test_a_node_without_a_member_of_the_job_hears_nothing_of_its_neighbors(tmp_path: Path) -> None:
    async def story() -> None:
        async with scene(tmp_path) as here:
            assert await here.get(here.node("n0")) == "hello"
            stranger = here.node("n1", member=False)
            heard: list[object] = []
            seek = Seek(ref=here.ref("n1"), source=f"package:{SHA}", fingerprint=SHA, count=4)
            here.tracker.seek(seek, stranger.name, heard.append)
            assert not heard

    asyncio.run(story())
