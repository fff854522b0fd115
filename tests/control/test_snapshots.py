"""A snapshot of checkpoints changes as a whole, wherever the head or the agent is killed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.agent.blocks.store import FILES
from shoal.agent.keeping.copying import Copying
from shoal.agent.keeping.keeping import _restore, _swap
from shoal.agent.keeping.url_cache import UrlCache
from shoal.control.kept_files import Index
from shoal.control.output_room import OutputRoom
from shoal.control.outputs import Limits, OutputStore
from shoal.model.job import MemberRef
from shoal.model.kept import FileAnswer, FilePiece, FileWanted, KeptFile, Kind, Snapshot

from .test_outputs import put, settle

REF = MemberRef("j1", 1, 0)
KIND = Kind.CHECKPOINT
LIMITS = Limits(job=1_000, total=10_000, spare=0)
# What changes a file system, by its name in `os`; `open` counts when it may write.
CHANGES = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "open", "chown", "utime")


class Killed(BaseException):
    """The process ends here, without cleaning up."""


@contextmanager
def killed_before(number: int) -> Iterator[dict[str, int]]:
    """Nothing changes on disk from the change with this number on. Yields how many were tried."""
    count = {"tried": 0}

    def guarded(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if name != "open" or given[1] & (os.O_WRONLY | os.O_RDWR):
                count["tried"] += 1
                if count["tried"] >= number:
                    raise Killed
            return real(*given, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, guarded(getattr(os, name), name))
        yield count


def contents(store: OutputStore) -> dict[str, bytes]:
    """What the next attempt gets, the way a node asks for it."""
    listed = store.sent(FileWanted(REF, KIND))
    wanted = [FileWanted(REF, KIND, one.path, snapshot=listed.snapshot) for one in listed.files]
    found = [store.sent(one) for one in wanted]
    assert not [one.problem for one in found if one.problem]
    return {one.path: one.data for one in found}


def save(store: OutputStore, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        assert not put(store, path, data, kind=KIND, modified_ms=_time(data)).problem


def try_settle(store: OutputStore, files: dict[str, bytes]) -> FileAnswer:
    sizes = {path: len(data) for path, data in files.items()}
    times = {path: _time(data) for path, data in files.items()}
    return settle(store, sizes, REF, "n1", times)


def settled(store: OutputStore, files: dict[str, bytes]) -> None:
    assert not try_settle(store, files).problem


def _time(data: bytes) -> int:
    """Another content was written at another time."""
    return sum(data)


OLD = {"model.pt": b"step 100", "optimizer.pt": b"step 100", "same": b"x", "gone/a": b"100"}
NEW = {**OLD, "model.pt": b"step 200", "optimizer.pt": b"step 200", "gone": b"2", "b/c": b"2"}
del NEW["gone/a"]
SAME_NAMES = {**OLD, "model.pt": b"step 200", "optimizer.pt": b"step 200"}


def replaced(root: Path, number: int, new: dict[str, bytes]) -> tuple[bool, dict[str, bytes]]:
    """The head is killed while the second snapshot takes its place. Then the next head reads."""
    store = OutputStore(root, LIMITS)
    save(store, OLD)
    settled(store, OLD)
    save(store, {path: data for path, data in new.items() if OLD.get(path) != data})
    over = threading.Event()
    real = store._settle

    def once(*given: Any) -> None:
        try:
            real(*given)
        finally:
            over.set()

    store.__dict__["_settle"] = once
    listed = tuple(KeptFile(path, len(data), _time(data)) for path, data in new.items())
    with killed_before(number) as count:
        store.settle(Snapshot(REF, 2, listed), "n1", 1_000, lambda _: None, lambda _: None)
        assert over.wait(120)
    store.close()
    after = OutputStore(root, LIMITS)
    try:
        found = contents(after)
        # The node sends what the next head misses, and then it has the new one.
        if try_settle(after, new).lost:
            save(after, new)
            settled(after, new)
        assert contents(after) == new
        assert OutputRoom(after, lambda _: None).look({"j1": "default"}, 0).total == sum(
            len(data) for data in new.values()
        ), "nothing is left behind"
    finally:
        after.close()
    return count["tried"] >= number, found


@pytest.mark.parametrize("new", [NEW, SAME_NAMES])
def test_a_head_killed_between_any_two_changes_leaves_the_old_snapshot_or_the_new(
    tmp_path: Path, new: dict[str, bytes]
) -> None:
    seen = []
    for number in range(1, 200):
        hit, found = replaced(tmp_path / str(number), number, new)
        assert found in (OLD, new), f"killed before change {number}: {found}"
        seen.append(found == new)
        if not hit:
            break
    assert len(seen) > 5 and seen[-1], "it was killed at each change, and then not at all"
    assert seen == sorted(seen), "one switch: the old one before it, the new one after it"


def test_a_snapshot_of_an_earlier_version_is_read_and_then_replaced(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    folder = root / "j1" / "checkpoint"
    folder.mkdir(parents=True)
    for name in ("model.pt", "optimizer.pt"):
        (folder / name).write_bytes(b"step 50")
        os.utime(folder / name, ns=(_time(b"step 50") * 1_000_000,) * 2)
    (folder / "half").write_bytes(b"moved there before its head was killed")
    files = [KeptFile(name, 7, _time(b"step 50")) for name in ("model.pt", "optimizer.pt")]
    (root / "j1" / "index.json").write_bytes(msgspec.json.encode(Index(1, {"n1": files})))
    store = OutputStore(root, LIMITS)
    try:
        before = {"model.pt": b"step 50", "optimizer.pt": b"step 50"}
        assert contents(store) == before, "only files of the snapshot"
        save(store, {"model.pt": b"step 60"})
        settled(store, {**before, "model.pt": b"step 60"})
        assert contents(store) == {**before, "model.pt": b"step 60"}
        save(store, NEW)
        settled(store, NEW)
        assert contents(store) == NEW
        assert not folder.exists() or not list(folder.iterdir())
        store.drop("j1", KIND)
        put(store, "output", b"x")  # so the one before is done
        assert contents(store) == {}
        assert [one.name for one in (root / "j1").iterdir()] == ["output"]
    finally:
        store.close()


def test_a_node_never_gets_files_of_two_snapshots(tmp_path: Path) -> None:
    """A node of the same attempt saves while another one still fetches."""
    store = OutputStore(tmp_path / "outputs", LIMITS)
    try:
        save(store, OLD)
        settled(store, OLD)
        listed = store.sent(FileWanted(REF, KIND))
        save(store, NEW)
        settled(store, NEW)
        late = store.sent(FileWanted(REF, KIND, "model.pt", snapshot=listed.snapshot))
        assert "newer" in late.problem and not late.data
        assert store.sent(FileWanted(REF, KIND, "model.pt")).data == b"step 200", "an older agent"
    finally:
        store.close()


def test_an_agent_killed_between_any_two_changes_loses_no_checkpoint_of_its_node(
    tmp_path: Path,
) -> None:
    """The head's files and those that only this node has take their place together."""
    here = {"only-here": b"newest", "model.pt": b"old"}
    together = {"only-here": b"newest", "model.pt": b"fetched", "a/b": b"fetched"}
    for number in range(1, 100):
        place = tmp_path / str(number) / "j1"
        fresh = place.with_name(".j1.fetched")
        _write(place, here)
        _write(fresh, {"model.pt": b"fetched", "a/b": b"fetched"})
        with killed_before(number) as count, suppress(Killed):
            _swap(place, fresh, {"only-here"}, 0)
        _restore(place, fresh)
        assert _read(place) in (here, together), f"killed before change {number}"
        if count["tried"] < number:
            break
    assert number > 3
    assert _read(place) == together
    assert [one.name for one in place.parent.iterdir()] == ["j1"]


def test_a_volume_in_the_cache_is_whole_wherever_the_agent_is_killed(tmp_path: Path) -> None:
    """Also one that takes the place of another with the same name."""
    old, new = {"a": b"old", "b": b"old"}, {"a": b"new", "b": b"new"}
    for number in range(1, 100):
        cache = UrlCache(tmp_path / str(number))
        for at, files in ((0, old), (number, new)):
            _write(cache.root / ".part" / FILES, files)
            with killed_before(at or 1_000) as count, suppress(Killed):
                cache.put(cache.root / ".part", "k")
        cache.clear_up()
        found = _read(cache.root / "k" / FILES) if cache.find("k") else None
        assert found in (None, old, new), f"killed before change {number}: {found}"
        if count["tried"] < number:
            break
    assert number > 5 and found == new


def test_an_agent_settles_a_snapshot_until_the_head_has_it(tmp_path: Path) -> None:
    """A settled snapshot counts; files that only came do not. The last one before a member's end is
    the one that the next attempt starts from."""
    (tmp_path / "model.pt").write_bytes(b"step 200")
    answers = [
        FileAnswer(KIND, 0, 0, "the head has restarted", again=True),
        FileAnswer(KIND, 0, 0, "model.pt has not arrived", again=True, lost=True),
        FileAnswer(KIND, 0, 0),
    ]
    sent: list[str] = []

    async def follow() -> None:
        def send(what: FilePiece | Snapshot) -> bool:
            sent.append(type(what).__name__)
            if isinstance(what, FilePiece):
                said = FileAnswer(KIND, what.serial, what.offset + len(what.data))
            else:
                said = msgspec.structs.replace(answers.pop(0), serial=what.serial)
                if not answers:
                    settled.set()
            asyncio.get_running_loop().call_soon(copying.take, said)
            asyncio.get_running_loop().call_soon(copying.reconnected)
            return True

        copying, settled = Copying(send), asyncio.Event()
        copying.watch(REF, KIND, str(tmp_path), None)
        copying.ended(REF)
        async with asyncio.timeout(120):
            await settled.wait()
        copying.forget(REF)

    asyncio.run(follow())
    assert sent == ["FilePiece", "Snapshot", "Snapshot", "FilePiece", "Snapshot"]


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def _read(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
