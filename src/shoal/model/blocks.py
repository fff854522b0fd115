"""Files in blocks: which blocks a set of files has, what they hash to, and how nodes ask for them.

A block is at most `BLOCK_BYTES` of one file, named by the SHA-256 of its content. A `Layout` is
known as soon as the files are listed: paths and sizes give every block a number. A `Manifest` adds
the hashes, and has a name of its own: the SHA-256 of its encoding.
"""

from __future__ import annotations

import hashlib
import hmac
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import Annotated, NamedTuple

import msgspec

from shoal.model.job import MemberRef

BLOCK_BYTES = 4 << 20
HASH_BYTES = 32
FILES_MAX = 200_000
BLOCKS_MAX = 2_000_000  # of one set of files: 8 TB in large ones
PATH_BYTES_MAX = 4096
BYTES_OF_MBIT = 125_000
NUMBERS_MAX = 20_000  # blocks in one message
HOLDINGS_MAX = 64  # volumes in a node's report: those that were used last
TOO_MANY = f"it has too many files, more than {FILES_MAX}: use archives"
TICKET_S = 3600  # clocks of nodes may differ by minutes


class Span(NamedTuple):
    """Where a block is: so many bytes at this offset of the file with this number."""

    file: int
    offset: int
    size: int


class Layout:
    """Files in the order of their paths; their blocks are numbered through. A file whose `size` is
    None has no blocks: it can be had as a whole only."""

    def __init__(self, files: Iterable[tuple[str, int | None]]) -> None:
        self.files = tuple(files)
        counts = (-(-(size or 0) // BLOCK_BYTES) for _, size in self.files)
        self._starts = [0, *accumulate(counts)]

    @property
    def count(self) -> int:
        return self._starts[-1]

    @property
    def size(self) -> int:
        return sum(size or 0 for _, size in self.files)

    def span(self, number: int) -> Span:
        """IndexError if there is no such block."""
        if not 0 <= number < self.count:
            raise IndexError(number)
        file = bisect_right(self._starts, number) - 1
        offset = (number - self._starts[file]) * BLOCK_BYTES
        return Span(file, offset, min(BLOCK_BYTES, (self.files[file][1] or 0) - offset))

    def blocks(self, file: int) -> range:
        return range(self._starts[file], self._starts[file + 1])

    def problem(self) -> str:
        """Why this cannot be a set of files; empty if it can. Somebody else may have made it."""
        if len(self.files) > FILES_MAX:
            return TOO_MANY
        if any(size is not None and size < 0 for _, size in self.files):
            return "a file in it has a negative size"
        if self.count > BLOCKS_MAX:
            return f"it has {self.count} blocks, more than {BLOCKS_MAX}"
        before, folders = "", set()
        for path, _ in self.files:
            if file_problem(path):
                return f"{path[:200]!r} in it {file_problem(path)}"
            if path <= before:
                return f"{path[:200]!r} in it is there twice, or not in order"
            before, parent = path, path.rpartition("/")[0]
            while parent and parent not in folders:
                folders.add(parent)
                parent = parent.rpartition("/")[0]
        both = next((path for path, _ in self.files if path in folders), "")
        return f"{both[:200]!r} in it is both a file and a folder" if both else ""


def file_problem(path: str) -> str:
    """Why no file of a volume may have this path; empty if one may."""
    if not path or any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
        return "is not a relative path"
    try:
        return "is too long" if len(path.encode()) > PATH_BYTES_MAX else ""
    except UnicodeEncodeError:
        return "is not UTF-8"


class FileBlocks(msgspec.Struct, frozen=True, array_like=True):
    """`hashes`: of its blocks, one after the other."""

    path: str
    size: int
    hashes: bytes


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    files: Annotated[tuple[FileBlocks, ...], msgspec.Meta(max_length=FILES_MAX)]

    @property
    def layout(self) -> Layout:
        return Layout((file.path, file.size) for file in self.files)

    def hashes(self) -> list[bytes]:
        whole = b"".join(file.hashes for file in self.files)
        return [whole[at : at + HASH_BYTES] for at in range(0, len(whole), HASH_BYTES)]


class BadManifest(ValueError):
    """What arrived is not the manifest that was named, or lies."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Manifest).decode


def encode_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """And its name."""
    data = _encode(manifest)
    return data, hashlib.sha256(data).hexdigest()


def decode_manifest(data: bytes, name: str = "") -> Manifest:
    """Raises BadManifest unless it is the one of this name (empty: any) and may be written to a
    disk."""
    if name and hashlib.sha256(data).hexdigest() != name:
        raise BadManifest("the manifest does not have the hash that it was announced with")
    try:
        manifest = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if "length" in str(error):  # nothing of it was decoded
            raise BadManifest(f"the manifest is refused: {TOO_MANY}") from None
        raise BadManifest(f"the manifest cannot be read: {error}") from None
    layout = manifest.layout
    if problem := layout.problem():
        raise BadManifest(f"the manifest is refused: {problem}")
    for number, file in enumerate(manifest.files):
        if len(file.hashes) != HASH_BYTES * len(layout.blocks(number)):
            raise BadManifest(
                f"the manifest has not one hash for each block of {file.path[:200]!r}"
            )
    return manifest


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A volume that a node holds, or a part of it. `volume`: as `volume_key` names it."""

    volume: str
    held_bytes: int
    size_bytes: int


def volume_key(tenant: str, source: str) -> str:
    """Names a volume as far as it is known before anybody has listed it."""
    return digest(tenant, source)


def package_source(package: str) -> str:
    """What a node seeks in place of a URL, to get the package of a job."""
    return f"package:{package}"


def digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]


# How a node gets a block from another one: by the address of its door, and a ticket of the head.


class Door(msgspec.Struct, frozen=True):
    """Where a node offers blocks; `fingerprint`: SHA-256 of its certificate. The head signs tickets
    with `secret`, which nobody else gets."""

    port: int
    fingerprint: bytes
    secret: bytes


class Peer(msgspec.Struct, frozen=True):
    """A node that has blocks of the set `key`, and what opens its door until then (seconds since
    the epoch)."""

    node: str
    address: str
    port: int
    fingerprint: bytes
    key: str
    ticket: bytes
    until_s: int


def ticket(secret: bytes, key: str, fetcher: str, until_s: int) -> bytes:
    """Proves to a door that the head lets this node fetch this set until then."""
    return hmac.digest(secret, f"{key}\0{fetcher}\0{until_s}".encode(), "sha256")


def peer_of(node: str, address: str, door: Door, key: str, fetcher: str, now_s: int) -> Peer:
    """As the head tells the node `fetcher` of it."""
    until_s = now_s + TICKET_S
    proof = ticket(door.secret, key, fetcher, until_s)
    return Peer(node, address, door.port, door.fingerprint, key, proof, until_s)


# What nodes ask the head's tracker, and what it answers.


class Seek(msgspec.Struct, frozen=True, kw_only=True):
    """For a member of `ref`, this node wants blocks of what `source` lists as `fingerprint`. `got`:
    blocks that are here, with their hashes, since it last said so; `alone`: those that cannot be
    shared. `origin`, `peers`: how many it would take now, from the origin and from neighbors, and
    `wish` those first; `only`: no others. `refused`: blocks that a node did not give, and whether
    it gave something else. `begins`: what this node was told before was lost with the process that
    heard it, and what it had may be gone. `over`: it stops here, so that what it has claimed is
    free; `changed`: because the origin changed while it was read."""

    ref: MemberRef
    source: str
    fingerprint: str
    count: int
    got: tuple[tuple[int, bytes], ...] = ()
    alone: tuple[int, ...] = ()
    origin: int = 0
    peers: int = 0
    wish: tuple[int, ...] = ()
    only: bool = False
    refused: tuple[tuple[int, str, bool], ...] = ()
    begins: bool = False
    over: bool = False
    changed: bool = False


class Sought(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and any news later on. `blocks`: number, hash, and the nodes of `peers` that have
    it. `origin`: for this node to read from the origin, before a while is over. `again`: nodes do
    not agree about these, so that each reads them from the origin. `anew`: the head does not know
    what is here, and wants to hear all of it. `alone`: it keeps no track of this, so that the node
    goes on by itself."""

    ref: MemberRef
    source: str
    fingerprint: str
    peers: tuple[Peer, ...] = ()
    blocks: tuple[tuple[int, bytes, tuple[str, ...]], ...] = ()
    origin: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    anew: bool = False
    alone: bool = False
