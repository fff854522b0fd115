"""Encrypted files: what was changed, cut, moved or exchanged is refused, and clear text stays on
the nodes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from shoal.agent.faults import CannotStart
from shoal.agent.keeping.copying import Copying
from shoal.agent.keeping.keeping import Fetching
from shoal.control.outputs import CLEAR, LIMITS, OutputStore
from shoal.link.sealed_files import (
    CHUNK_BYTES,
    FIRST_BYTES,
    HEADER_BYTES,
    SealedFile,
    SealError,
    clear_size,
    opened,
    sealed_size,
)
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.kept import PIECE_BYTES, FilePiece, FileWanted, Kind, Snapshot

from .test_outputs import put

KEY, OTHER = b"k" * 32, b"o" * 32
KIND = Kind.CHECKPOINT
MARKER = b"clear text of a tenant"
SIZES = (0, 1, FIRST_BYTES - 1, FIRST_BYTES, FIRST_BYTES + 1, FIRST_BYTES + 2 * CHUNK_BYTES)


def sealed(tmp_path: Path, clear: bytes, path: str = "model.pt", key: bytes = KEY) -> list[bytes]:
    (tmp_path / "clear").write_bytes(clear)
    file = SealedFile(key, "j1", KIND, path, len(clear))
    handle = os.open(tmp_path / "clear", os.O_RDONLY)
    try:
        return [file.seal(handle, number) for number in range(file.last + 1)]
    finally:
        os.close(handle)


def read(pieces: list[bytes], path: str = "model.pt", key: bytes = KEY, job: str = "j1") -> bytes:
    data = b"".join(pieces)
    file = opened(key, job, KIND, path, len(data), data)
    return b"".join(file.open_all(0, data))


@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_any_size_comes_back_and_its_sizes_follow_from_each_other(
    tmp_path: Path, size: int
) -> None:
    clear = os.urandom(size)
    pieces = sealed(tmp_path, clear)
    assert all(len(piece) == PIECE_BYTES for piece in pieces[:-1])
    assert sum(map(len, pieces)) == sealed_size(size) and clear_size(sealed_size(size)) == size
    assert read(pieces) == clear


def test_every_change_of_an_encrypted_file_is_noticed(tmp_path: Path) -> None:
    clear = os.urandom(FIRST_BYTES + CHUNK_BYTES + 100)
    pieces = sealed(tmp_path, clear)
    other = sealed(tmp_path, clear)  # the same file, encrypted once more
    longer = [pieces[0][:-1] + bytes([pieces[0][-1] ^ 1]), *pieces[1:]]
    size = (len(clear) - CHUNK_BYTES).to_bytes(8, "big")
    shrunk = pieces[0][: HEADER_BYTES - 8] + size + pieces[0][HEADER_BYTES:]
    attacks = {
        "a byte": longer,
        "its end is cut": pieces[:-1],
        "its last bytes are cut": [*pieces[:-1], pieces[-1][:-1]],
        "something is added": [*pieces, b"x" * 64],
        "its order": [pieces[0], pieces[2] + bytes(PIECE_BYTES - len(pieces[2])), pieces[1]],
        "a chunk of an earlier version": [pieces[0], other[1], pieces[2]],
        "a chunk twice": [pieces[0], pieces[1], pieces[1][: len(pieces[2])]],
        "a chunk is left out, and the size is made to fit": [shrunk, pieces[2]],
    }
    for name, attack in attacks.items():
        with pytest.raises(SealError):
            assert read(attack) is None, name
    for path, job in (("other.pt", "j1"), ("model.pt", "j2")):
        with pytest.raises(SealError, match="damaged"):
            read(pieces, path, job=job)
    with pytest.raises(SealError, match="another key than the tenant's secret encryption-key"):
        read(pieces, key=OTHER)
    with pytest.raises(SealError, match="is not encrypted"):
        read([clear])


class Way:
    """A node that copies its folder to a store, and another one that fetches it."""

    def __init__(self, store: OutputStore, root: Path) -> None:
        self.store, self.root = store, root
        self.settled = asyncio.Event()

    def send(self, message: FilePiece | Snapshot) -> bool:
        loop = asyncio.get_running_loop()

        def answer(said: Any) -> None:
            loop.call_soon_threadsafe(self.copying.take, said)

        def kept(_: Any) -> None:
            loop.call_soon_threadsafe(self.settled.set)

        if isinstance(message, FilePiece):
            self.store.take(message, "n1", over=True, answer=answer)
        else:
            self.store.settle(message, "n1", 1 << 30, answer, kept)
        return True

    async def save(self, folder: Path, key: bytes | None) -> None:
        self.copying = Copying(self.send, None, lambda _: key)
        ref = MemberRef("j1", 1, 0)
        self.copying.watch(ref, KIND, str(folder), None)
        self.copying.ended(ref)
        async with asyncio.timeout(60):
            await self.settled.wait()
        self.copying.forget(ref)

    async def fetch(self, key: bytes) -> Path:
        ref = MemberRef("j1", 2, 0)
        launch = Launch(node="n2", incarnation=1, ref=ref, argv=("x",), env={}, travels=True)

        def want(wanted: FileWanted) -> None:
            asyncio.get_running_loop().call_soon(fetching.take, self.store.sent(wanted))

        fetching = Fetching(str(self.root), want, lambda _: key)
        await fetching.get(launch, 0)
        assert set(fetching.found["j1"]) == {"model.pt", "small"}, "they need not be sent again"
        return self.root / "j1"


def test_a_checkpoint_travels_encrypted_and_a_lost_key_is_a_reason_not_a_new_start(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "model.pt").write_bytes(MARKER + os.urandom(3 * PIECE_BYTES) + MARKER)
    (folder / "small").write_bytes(MARKER)
    store = OutputStore(tmp_path / "head", LIMITS._replace(spare=0))
    store.encrypts = lambda job: job == "j1"
    try:
        way = Way(store, tmp_path / "n2")
        asyncio.run(way.save(folder, KEY))
        held = [path.read_bytes() for path in (tmp_path / "head").rglob("*") if path.is_file()]
        assert len(held) == 3 and not [data for data in held if MARKER in data]
        with pytest.raises(CannotStart, match=r"its checkpoint .* was encrypted with another key"):
            asyncio.run(way.fetch(OTHER))
        assert not (tmp_path / "n2" / "j1").exists(), "never a file that is empty or half there"
        found = asyncio.run(way.fetch(KEY))
        for name in ("model.pt", "small"):
            assert (found / name).read_bytes() == (folder / name).read_bytes()
        said = put(store, "clear", MARKER)
        assert said.problem == CLEAR and not said.again, "an agent that does not know of it"
        assert CLEAR in store.notes("j1")[0]
    finally:
        store.close()
