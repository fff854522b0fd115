"""A volume on several nodes: each block leaves the origin once, and what was killed goes on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.server
import os
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.mounts import small_disk

from shoal.agent.blocks.doorkeeper import Doorkeeper
from shoal.agent.faults import CannotStart
from shoal.agent.keeping.url_volumes import Means, UrlVolumes
from shoal.control.blocks import Tracker
from shoal.model.blocks import BLOCK_BYTES, Seek
from shoal.model.commands import Launch
from shoal.model.job import Fault, MemberRef
from tests.needs import need

need("fsspec")
need("aiohttp")

DATA = random.Random(7).randbytes(6 * BLOCK_BYTES + 5)


class Origin(http.server.BaseHTTPRequestHandler):
    """Gives ranges, and counts what it gives. It waits at a block until the gate is open."""

    protocol_version = "HTTP/1.1"
    given = 0
    gate = threading.Event()
    lock = threading.Lock()

    def do_HEAD(self, first: int = 0, last: int = len(DATA) - 1) -> None:
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("ETag", '"one"')
        self.end_headers()

    def do_GET(self) -> None:
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        if int(last) > int(first):
            if int(first) >= 3 * BLOCK_BYTES:
                self.gate.wait(60)
            with Origin.lock:
                Origin.given += int(last) - int(first) + 1
        self.do_HEAD(int(first), int(last))
        with contextlib.suppress(OSError):
            self.wfile.write(DATA[int(first) : int(last) + 1])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def origin() -> Iterator[str]:
    Origin.given = 0
    Origin.gate.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Origin) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/set.bin"
        Origin.gate.set()
        server.shutdown()


class World:
    """Nodes as their agents are, as far as volumes go, and the head's tracker."""

    def __init__(self, root: Path, url: str) -> None:
        self._root, self._url = root, url
        self.state: Any = SimpleNamespace(placed={}, nodes={})
        self.tracker = Tracker(lambda: self.state)
        self.lazy: tuple[str, ...] = ()
        self.others: set[MemberRef] = set()
        self._nodes: list[UrlVolumes] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.keepers: list[Doorkeeper] = []

    def node(self, name: str) -> UrlVolumes:
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        keeper = Doorkeeper(folder, lambda door: self.tracker.opens(name, door))
        volumes = UrlVolumes(folder)
        volumes.name, volumes.offer = name, keeper.offer

        def seek(one: Seek) -> None:
            asyncio.get_running_loop().call_soon(self.tracker.seek, one, name, volumes.found)

        volumes.seek = seek
        spec = SimpleNamespace(tenant="t", volumes=(f"{self._url}:data",), package="")
        self.state.placed[name] = {self.ref(name): SimpleNamespace(spec=spec)}
        self.state.nodes[name] = SimpleNamespace(spec=SimpleNamespace(address="127.0.0.1"))
        self.keepers.append(keeper)
        self._tasks.append(asyncio.create_task(self._reap(volumes)))
        volumes.offer_all()
        self._nodes.append(volumes)
        return volumes

    @staticmethod
    def ref(name: str) -> MemberRef:
        return MemberRef("j1", 1, int(name[1:]))

    async def get(self, volumes: UrlVolumes, name: str = "", ref: MemberRef | None = None) -> Path:
        name = name or volumes.name
        if ref is not None:
            self.others.add(ref)
            self.state.placed[name][ref] = self.state.placed[name][self.ref(name)]
        launch = Launch(
            node=name,
            incarnation=1,
            ref=ref or self.ref(name),
            volume_lazy=self.lazy,
            argv=("true",),
            env={},
            workdir="",
            stop_grace_ms=0,
            tenant="t",
            volumes=(f"{self._url}:data",),
        )
        done = await volumes.get(launch, lambda _: Means({}, (), sys.executable))
        return Path(done.env["SHOAL_VOLUME_DATA"])

    async def _reap(self, volumes: UrlVolumes) -> None:
        """As the agent waits for its children."""
        while True:
            for pid in volumes.pids():
                found, status = await asyncio.to_thread(os.waitpid, pid, os.WNOHANG)
                if found:
                    volumes.ended(pid, os.waitstatus_to_exitcode(status))
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        for node in self._nodes:
            for ref in (*self.state.placed.get(node.name, ()), *self.others):
                node.forget(ref)
            await until(lambda node=node: not node.pids())
        for task in self._tasks:
            task.cancel()
        for keeper in self.keepers:
            if (door := keeper.close()) is not None:
                await asyncio.to_thread(door.wait)


@contextlib.asynccontextmanager
async def world(root: Path, url: str) -> AsyncIterator[World]:
    made = World(root, url)
    try:
        yield made
    finally:
        await made.close()


async def until(fact: Any) -> None:
    async with asyncio.timeout(60):
        while not fact():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_two_nodes_read_the_origin_once_and_go_on_after_a_kill(
    tmp_path: Path, origin: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def story() -> None:
        async with world(tmp_path, origin) as here:
            one, two = here.node("n1"), here.node("n2")
            both = [asyncio.create_task(here.get(node)) for node in (one, two)]
            await until(lambda: one.pids() and Origin.given >= 2 * BLOCK_BYTES)
            await until(lambda: len(here.tracker.doors) == 2)
            for pid in one.pids():
                os.kill(pid, signal.SIGKILL)  # another helper goes on with what this one had
            Origin.gate.set()
            folders = await asyncio.gather(*both)
            for folder in folders:
                assert hashlib.sha256((folder / "set.bin").read_bytes()).digest() == (
                    hashlib.sha256(DATA).digest()
                )
                assert (folder / "set.bin").stat().st_mode & 0o777 == 0o444
            # What the killed helper was reading is read again, which may be all of it.
            assert len(DATA) <= Origin.given <= 2 * len(DATA)
            given = Origin.given
            three = here.node("n3")
            assert (await here.get(three) / "set.bin").read_bytes() == DATA
            assert Origin.given == given, "neighbors have all of it"
            (held,) = three.held
            assert held.held_bytes == held.size_bytes == len(DATA)
            again = here.node("n3")  # the agent has died, and its folder is there
            await here.get(again)
            assert Origin.given == given
            assert "is used again" in caplog.text

    asyncio.run(story())


def test_a_node_whose_head_says_nothing_reads_the_origin_itself(
    tmp_path: Path, origin: str
) -> None:
    Origin.gate.set()

    async def story() -> None:
        async with world(tmp_path, origin) as here:
            node = here.node("n1")
            node.name = ""  # it has no link
            assert (await here.get(node, "n1") / "set.bin").read_bytes() == DATA

    asyncio.run(story())
    assert Origin.given == len(DATA)


def test_a_cache_disk_that_fills_meanwhile_is_named_and_the_volume_comes_when_there_is_room(
    tmp_path: Path, origin: str
) -> None:
    async def story() -> None:
        async with world(tmp_path, origin) as here:
            node = here.node("n1")
            fetching = asyncio.create_task(here.get(node))
            await until(lambda: Origin.given >= BLOCK_BYTES)
            filler = tmp_path / "filler"
            fill(filler)
            Origin.gate.set()
            with pytest.raises(CannotStart, match=r"volume data: .*No space left") as why:
                await fetching
            assert why.value.fault is Fault.MISSING, "another node is tried"
            node.forget(here.ref("n1"))
            filler.unlink()
            assert (await here.get(node) / "set.bin").read_bytes() == DATA

    with small_disk(tmp_path, 4 * len(DATA)):
        asyncio.run(story())


def fill(path: Path) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(handle, bytes(64 << 10)):
            pass
    os.close(handle)
