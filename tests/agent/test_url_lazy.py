"""Volumes whose files are fetched as they are read."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import shoal.data
from shoal.agent.blocks.store import INDEX, RECORD_BYTES
from shoal.data.coming import Coming
from shoal.model.blocks import BLOCK_BYTES
from shoal.model.job import MemberRef
from shoal.model.volume import READERS
from tests.agent.test_url_sharing import DATA, Origin, World, origin, until, world
from tests.needs import need
from tests.reading.shards import write_images

need("fsspec")
need("aiohttp")

__all__ = ["origin"]  # a fixture
SHARDS = 12
OTHER = MemberRef("j2", 1, 0)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "origin"
    for number in range(SHARDS):
        write_images(folder / f"{number:03}.tar", range(10 * number, 10 * number + 10))
    return folder


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {READERS}


def samples(place: Path, match: str = "") -> list[Any]:
    return [sample["__key__"] for sample in shoal.data.open(str(place), match=match, buffer=10)]


def continued(folder: Path) -> list[Any]:
    """As of a run that is killed after 35 samples, and goes on from what it had saved."""
    first = shoal.data.open(str(folder), buffer=10)
    found = [sample["__key__"] for sample in islice(first, 35)]
    state = first.state_dict()
    second = shoal.data.open(str(folder), buffer=10)
    second.load_state_dict(state)
    return found + [sample["__key__"] for sample in second]


def lazy(world: World) -> World:
    world.lazy = ("data",)
    return world


def test_only_the_shards_that_are_read_come_and_in_the_order_of_a_local_folder(
    tmp_path: Path, shards: Path
) -> None:
    async def story() -> None:
        async with world(tmp_path, f"file://{shards}") as here:
            node = lazy(here).node("n1")
            folder = await here.get(node)
            assert not files(folder), "the member starts before any file is here"
            there = await asyncio.to_thread(samples, folder, "00[0-3].tar")
            assert there == samples(shards, "00[0-3].tar")
            assert files(folder) == {f"{number:03}.tar" for number in range(4)}
            assert not node.held, "it is not whole"

            assert await asyncio.to_thread(continued, folder) == samples(shards)
            await until(lambda: node.held)  # what was read is kept, at the same path
            assert not (folder / READERS).exists()
            assert await asyncio.to_thread(samples, folder) == samples(shards)
            assert await here.get(node, ref=OTHER) == folder

    asyncio.run(story())


def test_a_reader_goes_on_when_its_helper_is_killed_and_when_the_job_that_began_has_ended(
    tmp_path: Path, shards: Path
) -> None:
    async def story() -> None:
        async with world(tmp_path, f"file://{shards}") as here:
            node = lazy(here).node("n1")
            folder = await here.get(node)
            assert await here.get(node, ref=OTHER) == folder, "another job reads along"
            for end in ("kill", "leave", ""):
                match = f"*{len(end)}.tar"
                assert await asyncio.to_thread(samples, folder, match) == samples(shards, match)
                (before,) = node.pids()
                if end == "kill":
                    os.kill(before, signal.SIGKILL)
                elif end == "leave":
                    node.forget(here.ref("n1"))
                if end:
                    await until(lambda before=before: node.pids() and before not in node.pids())

    asyncio.run(story())


def test_whoever_comes_next_goes_on_with_what_a_reader_had_fetched(
    tmp_path: Path, origin: str
) -> None:
    async def story() -> None:
        async with world(tmp_path, origin.replace("set.bin", "set.tar")) as here:
            node = lazy(here).node("n1")
            folder = await here.get(node)
            index = folder.parent / INDEX
            empty = index.stat().st_size
            Coming("data", str(folder), "").coming(["set.tar"], waited=False)
            await until(lambda: index.stat().st_size == empty + 3 * RECORD_BYTES)
            node.forget(here.ref("n1"))
            await until(lambda: not node.pids())
            Origin.gate.set()
            here.lazy = ()
            assert await here.get(node) == folder
            assert await asyncio.to_thread((folder / "set.tar").read_bytes) == DATA
            # The helper that was ended had begun to read all others.
            assert Origin.given <= 2 * len(DATA) - 3 * BLOCK_BYTES

    asyncio.run(story())


def test_two_nodes_that_read_the_same_read_the_origin_once(tmp_path: Path, origin: str) -> None:
    async def story() -> None:
        async with world(tmp_path, origin.replace("set.bin", "set.tar")) as here:
            nodes = [lazy(here).node(name) for name in ("n1", "n2")]
            folders = [await here.get(node) for node in nodes]
            assert Origin.given == 0, "nobody has read anything"
            readers = [Coming("data", str(folder), "") for folder in folders]
            paths = [asyncio.to_thread(reader.path, "set.tar") for reader in readers]
            coming = asyncio.gather(*paths)
            await until(lambda: len(here.tracker.doors) == 2)
            Origin.gate.set()
            for path in await coming:
                assert await asyncio.to_thread(Path(path).read_bytes) == DATA
            assert Origin.given == len(DATA)

    asyncio.run(story())


def test_workers_of_a_loader_ask_for_themselves(tmp_path: Path, shards: Path) -> None:
    """Forked from a process that asks, or started with a copy of its data."""

    async def story() -> None:
        async with world(tmp_path, f"file://{shards}") as here:
            folder = await here.get(lazy(here).node("n1"))
            source = Coming("data", str(folder), "")
            assert await asyncio.to_thread(source.path, "000.tar") == str(folder / "000.tar")
            worker = get_context("fork").Process(target=source.path, args=("001.tar",))
            worker.start()
            await asyncio.to_thread(worker.join, 60)
            assert worker.exitcode == 0
            copy = pickle.loads(pickle.dumps(source))
            assert await asyncio.to_thread(copy.path, "002.tar") == str(folder / "002.tar")
            assert files(folder) == {"000.tar", "001.tar", "002.tar"}

    asyncio.run(story())


def test_a_shard_that_has_changed_since_the_start_is_not_read(tmp_path: Path, shards: Path) -> None:
    async def story() -> None:
        async with world(tmp_path, f"file://{shards}") as here:
            node = lazy(here).node("n1")
            folder = await here.get(node)
            data = shoal.data.open(str(folder), match="00[0-3].tar")
            write_images(shards / "002.tar", range(10))
            with pytest.raises(shoal.data.DataError, match=r"002\.tar changed while it was read"):
                await asyncio.to_thread(list, data)

    asyncio.run(story())
