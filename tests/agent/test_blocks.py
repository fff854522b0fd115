"""Blocks between nodes: who gets them, what is believed, and what goes on after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.agent.blocks import sharing, store
from shoal.agent.blocks.door import Door
from shoal.agent.blocks.fetch import Gathering, Line, NotGiven, fetch_manifest, gather
from shoal.agent.blocks.pace import Pace
from shoal.agent.blocks.store import FILES, PARTS, Holding, Offer, manifest_of
from shoal.model.blocks import (
    BLOCK_BYTES,
    BadManifest,
    FileBlocks,
    Layout,
    Manifest,
    Peer,
    Sought,
    decode_manifest,
    encode_manifest,
    peer_of,
)
from shoal.model.job import MemberRef

KEY = "k" * 32
CONTENT = {
    "a/large": random.Random(1).randbytes(2 * BLOCK_BYTES + 17),
    "b": random.Random(2).randbytes(BLOCK_BYTES),
    "empty": b"",
    "small": b"words",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for path, data in CONTENT.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


class Host:
    """A node with a door, and a whole copy of the files."""

    def __init__(self, name: str, folder: Path, data: bytes) -> None:
        self.name, self.folder = name, folder
        (folder / "manifest").write_bytes(data)
        self.door = Door()
        self.door.offer(Offer(key=KEY, folder=str(folder), manifest=str(folder / "manifest")))
        self.door.start()

    def peer(self, key: str = KEY) -> Peer:
        return peer_of(self.name, "127.0.0.1", self.door.at, key, "n0", int(time.time()))


@pytest.fixture
def hosts(tmp_path: Path, source: Path) -> Iterator[Callable[[str], Host]]:
    made: list[Host] = []

    def make(name: str) -> Host:
        folder = tmp_path / name
        for path, data in CONTENT.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        made.append(Host(name, folder, encode_manifest(manifest_of(source, CONTENT))[0]))
        return made[-1]

    yield make
    for host in made:
        host.door.close()


def content(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_a_set_comes_from_two_neighbors_and_a_corrupt_block_is_refused_by_name(
    tmp_path: Path, source: Path, hosts: Callable[[str], Host]
) -> None:
    n1, n2 = hosts("n1"), hosts("n2")
    bad = bytearray(CONTENT["a/large"])
    bad[5] ^= 1
    (n1.folder / "a/large").write_bytes(bad)
    peers = [n1.peer(), n2.peer()]
    name = encode_manifest(manifest_of(source, CONTENT))[1]
    manifest = fetch_manifest(peers, name, "n0")
    holding = Holding(tmp_path / "here", manifest.layout, name)
    lies: list[str] = []
    gathering = Gathering(holding, "n0")
    gathering.start()
    names = manifest.hashes()
    gathering.offer(peers, [(one, names[one], ("n1", "n2")) for one in holding.missing()])
    while not gathering.rest():
        gathering.wait(1.0)
    gathering.close()
    lies += gathering.problems
    assert content(tmp_path / "here" / FILES) == CONTENT
    assert lies == ["n1 gave a corrupt block 0: refused"]
    assert holding.manifest()[1] == name
    assert not os.listdir(tmp_path / "here" / PARTS), "nothing half is left"


class Counting(Pace):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def take(self, size: int) -> None:
        self.bytes += size


def test_what_is_given_and_what_is_taken_is_held_to_a_pace(
    tmp_path: Path, source: Path, hosts: Callable[[str], Host]
) -> None:
    host, taken, given = hosts("n1"), Counting(), Counting()
    host.door.pace = given
    manifest = manifest_of(source, CONTENT)
    holding = Holding(tmp_path / "here", manifest.layout, "m")
    parts = dict(enumerate(manifest.hashes()))
    last = len(parts) - 1
    data = b"".join(CONTENT[file.path] for file in manifest.files)[
        -manifest.layout.span(last).size :
    ]
    gathering = Gathering(holding, "n0", lambda _: data, pace=taken)
    gathering.offer([host.peer()], [(one, parts[one], ("n1",)) for one in range(last)])
    gathering.claim([last])
    gathering.start()
    while not gathering.rest():
        gathering.wait(1.0)
    gathering.close()
    assert content(tmp_path / "here" / FILES) == CONTENT
    assert taken.bytes == manifest.layout.size
    assert given.bytes == manifest.layout.size - len(data)


def test_without_a_neighbor_that_is_right_the_origin_is_read_and_compared_too(
    tmp_path: Path, source: Path, hosts: Callable[[str], Host]
) -> None:
    n1 = hosts("n1")
    (n1.folder / "small").write_bytes(b"swords")
    manifest = manifest_of(source, CONTENT)
    asked: list[int] = []

    def origin(number: int) -> bytes:
        asked.append(number)
        span = manifest.layout.span(number)
        data = (source / manifest.files[span.file].path).read_bytes()
        return data[span.offset : span.offset + span.size]

    holding = Holding(tmp_path / "here", manifest.layout, "m")
    assert gather(holding, manifest, [n1.peer()], "n0", origin) == []
    assert asked == [4] and content(tmp_path / "here" / FILES) == CONTENT
    (source / "small").write_bytes(b"other")
    again = Holding(tmp_path / "there", manifest.layout, "m")
    problem = "the origin has another block 4"
    assert gather(again, manifest, [n1.peer()], "n0", origin) == [problem]
    assert gather(again, manifest, [n1.peer()], "n0") == ["n1 gave a corrupt block 4: refused"]
    assert again.missing() == [4]


def test_a_stranger_an_old_ticket_and_a_ticket_for_another_set_open_nothing(
    hosts: Callable[[str], Host],
) -> None:
    n1 = hosts("n1")
    good = n1.peer()
    Line(good, "n0").close()
    late = peer_of("n1", "127.0.0.1", n1.door.at, KEY, "n0", int(time.time()) - 4000)
    other = peer_of("n1", "127.0.0.1", n1.door.at, "other", "n0", int(time.time()))
    forged = msgspec.structs.replace(other, key=KEY)
    for peer, own in ((late, "n0"), (forged, "n0"), (good, "n9")):
        with pytest.raises(NotGiven, match="hangs up"):
            Line(peer, own)
    with pytest.raises(NotGiven, match="no longer has it"):
        Line(other, "n0")
    with socket.create_connection((good.address, good.port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        plain.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in plain.recv(100)


def test_a_program_that_took_the_port_is_not_told_the_ticket(
    hosts: Callable[[str], Host],
) -> None:
    n1, thief = hosts("n1"), hosts("thief")
    peer = msgspec.structs.replace(n1.peer(), port=thief.door.at.port)
    with pytest.raises(NotGiven, match="is not what answers at its port") as raised:
        Line(peer, "n0")
    assert raised.value.lie


def test_links_and_files_of_others_are_not_given(tmp_path: Path) -> None:
    """The folder may belong to a tenant's user, who puts links where the door reads as root."""
    holding = Holding(tmp_path / "here", Layout([("deep/words", 5)]), "m")
    holding.write(0, b"words")
    layout = store.layout_of(holding.folder)
    assert store.read(holding.folder, layout, 0, os.getuid()) == b"words"
    with pytest.raises(PermissionError, match="not a file of this holding's user"):
        store.read(holding.folder, layout, 0, os.getuid() + 1)
    (tmp_path / "secret").write_bytes(b"other")
    words = tmp_path / "here" / FILES / "deep" / "words"
    words.unlink()
    words.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        store.read(holding.folder, layout, 0)
    words.unlink()
    os.rename(tmp_path / "here" / FILES / "deep", tmp_path / "deep")
    (tmp_path / "deep" / "words").write_bytes(b"other")
    (tmp_path / "here" / FILES / "deep").symlink_to(tmp_path / "deep")
    with pytest.raises(OSError, match="Not a directory"):
        store.read(holding.folder, layout, 0)


def test_a_holding_continues_with_what_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(3).randbytes(2 * BLOCK_BYTES)
    layout = Layout([("a", len(data)), ("b", 3)])
    killed = Holding(tmp_path / "here", layout, "m")
    killed.write(1, data[BLOCK_BYTES:])
    killed.write(2, b"abc")
    with open(tmp_path / "here" / store.INDEX, "ab") as file:
        file.write(b"half a record")
    after = Holding(tmp_path / "here", layout, "m")
    assert after.missing() == [0] and after.is_whole(1) and not after.is_whole(0)
    (tmp_path / "here" / FILES / "b").write_bytes(b"\0\0\0")  # a write that the disk has lost
    monkeypatch.setattr(store, "_boot", lambda: "another")
    rebooted = Holding(tmp_path / "here", layout, "m")
    assert rebooted.missing() == [0, 2]
    rebooted.write(2, b"abc")
    rebooted.write(0, data[:BLOCK_BYTES])
    assert content(tmp_path / "here" / FILES) == {"a": data, "b": b"abc"}
    assert Holding(tmp_path / "here", layout, "other listing").missing() == [0, 1, 2]


def test_a_wished_file_comes_next_and_is_seen_only_when_it_is_whole(tmp_path: Path) -> None:
    layout = Layout([(f"{number:03}", 10) for number in range(200)])
    holding = Holding(tmp_path / "here", layout, "m")
    order: list[int] = []
    gathering = Gathering(
        holding, "n0", lambda number: b"%010d" % number, on_got=lambda one, _: order.append(one)
    )
    gathering.claim(range(200))
    assert gathering.wishes() == []
    gathering.want([150, 160])
    assert gathering.wishes() == [], "they are claimed already"
    gathering.start()
    while not gathering.rest():
        gathering.wait(1.0)
    gathering.close()
    assert 150 in order[:16], "those that were taken before have ended"
    assert holding.is_whole(150)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([("../out", 1)], "is not a relative path"),
        ([("/etc/passwd", 1)], "is not a relative path"),
        ([("a", 1), ("a", 1)], "is there twice"),
        ([("a", 1), ("a-c", 1), ("a/b/c", 1)], "'a' in it is both a file and a folder"),
        ([("a", -1)], "negative size"),
        ([("a", 1 << 60)], "more than 2000000"),
        ([(str(number), 0) for number in range(200_001)], "more than 200000: use archives"),
    ],
)
def test_a_manifest_that_lies_is_refused(files: list[tuple[str, int]], problem: str) -> None:
    made = Manifest(tuple(FileBlocks(path, size, bytes(32)) for path, size in files))
    data, name = encode_manifest(made)
    with pytest.raises(BadManifest, match=problem):
        decode_manifest(data, name)


def test_a_manifest_of_ten_million_files_is_refused_before_any_of_them_is_decoded() -> None:
    lists = b"\x91\xdd" + (10_000_000).to_bytes(4, "big")
    with pytest.raises(BadManifest, match="too many files, more than 200000: use archives"):
        decode_manifest(lists + bytes(100))


def test_a_manifest_must_have_its_name_and_a_hash_for_each_block() -> None:
    short = Manifest((FileBlocks("a", BLOCK_BYTES + 1, hashlib.sha256(b"").digest()),))
    data, name = encode_manifest(short)
    with pytest.raises(BadManifest, match="not one hash for each block of 'a'"):
        decode_manifest(data, name)
    with pytest.raises(BadManifest, match="announced"):
        decode_manifest(data, "0" * 64)
    with pytest.raises(BadManifest, match="cannot be read"):
        decode_manifest(b"\xff\xff")


def test_a_node_that_is_answered_and_gets_nothing_reads_the_origin_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "IDLE_S", 0.2)
    data = random.Random(5).randbytes(BLOCK_BYTES + 9)
    layout = Layout((("one.bin", len(data)),))
    heard: queue.SimpleQueue[Sought] = queue.SimpleQueue()
    said: list[dict[str, Any]] = []

    def answer(words: dict[str, Any]) -> None:
        said.append(words)
        heard.put(Sought(ref=MemberRef("j1", 1, 0), source="u", fingerprint="f"))

    def read(number: int) -> bytes:
        span = layout.span(number)
        return data[span.offset : span.offset + span.size]

    holding = Holding(tmp_path, layout, "f")
    sharing.Sharing(holding, "n1", read, answer).run(heard)
    assert not holding.missing()
    assert said[0]["seeks"]
    assert not said[-1]["seeks"], "it asks for nothing more"
