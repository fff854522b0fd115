"""Sets of files on a node's disk of which some blocks are here and verified.

A holding is a folder. A file is at `parts/NUMBER` until all its blocks are here, and then at
`files/PATH`, so that whoever looks there sees whole files only. `blocks` beside them lists what was
verified, and is only appended to: who continues after a kill reads it. After the machine itself has
died, its last writes may be lost, so that blocks are verified again.

The folder may belong to a tenant's user. Whoever reads it for others follows no links (`read`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from shoal.model.blocks import (
    BLOCK_BYTES,
    HASH_BYTES,
    FileBlocks,
    Layout,
    Manifest,
    encode_manifest,
)

FILES, PARTS, INDEX, MANIFEST = "files", "parts", "blocks", "manifest"
SAYS = "shoal-volume "  # begins a helper's line for its agent; libraries print lines, too
NUMBER_BYTES = 4
RECORD_BYTES = NUMBER_BYTES + HASH_BYTES
HEADER_BYTES_MAX = 256 << 20
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Speed(msgspec.Struct, frozen=True, tag=True):
    """How fast a door gives blocks away; 0: as fast as it can."""

    bytes_s: float


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What may be given to those with a ticket for `key`: the holding in `folder`; with a
    `manifest` (a path), the files of that manifest, as they are in the folder. Files of another
    user than `owner` are not given. Without a folder, it is offered no more."""

    key: str
    folder: str = ""
    manifest: str = ""
    owner: int | None = None


class Header(msgspec.Struct, frozen=True, array_like=True):
    mark: str
    boot: str
    files: tuple[tuple[str, int | None], ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Header).decode


class Holding:
    """`have`: the blocks that are here, by number, with their hashes. Used by several threads."""

    def __init__(self, folder: Path | str, layout: Layout, mark: str) -> None:
        """Continues what is there if it has the same `mark` and files, else begins anew."""
        self.folder = str(folder)
        self.layout = layout
        self.have: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._left = [len(layout.blocks(number)) for number in range(len(layout.files))]
        self._folders: set[str] = set()
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        header = _encode(Header(mark, _boot(), layout.files))
        if not self._continue(header, mark):
            self._begin(header)
        self._index = os.open(self._path(INDEX), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def write(self, number: int, data: bytes, name: bytes = b"") -> bytes:
        """Keep a block; returns its hash, which is `name` if the caller has compared it."""
        span = self.layout.span(number)
        if len(data) != span.size:
            raise ValueError(f"block {number} has {len(data)} bytes instead of {span.size}")
        name = name or hashlib.sha256(data).digest()
        path = self._path(PARTS, str(span.file))
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with memoryview(data) as view:
                done = 0
                while done < len(view):
                    done += os.pwrite(handle, view[done:], span.offset + done)
        finally:
            os.close(handle)
        with self._lock:
            if number in self.have:
                return name
            os.write(self._index, number.to_bytes(NUMBER_BYTES) + name)
            self.have[number] = name
            self._left[span.file] -= 1
            if not self._left[span.file]:
                self._finish(span.file)
        return name

    def add_whole(self, file: int, path: str) -> None:
        """A file without blocks has arrived there."""
        with self._lock:
            os.replace(path, self._path(PARTS, str(file)))
            self._finish(file)

    def forget(self, number: int) -> None:
        """What is here of it is not what it should be, and will be written again."""
        with self._lock:
            if self.have.pop(number, None) is not None:
                file = self.layout.span(number).file
                if not self._left[file]:
                    os.replace(self._final(file), self._path(PARTS, str(file)))
                self._left[file] += 1

    def missing(self) -> list[int]:
        return [number for number in range(self.layout.count) if number not in self.have]

    def is_whole(self, file: int) -> bool:
        """All of this file is at its path."""
        return not self._left[file] and os.path.exists(self._final(file))

    @property
    def held_bytes(self) -> int:
        return sum(self.layout.span(number).size for number in list(self.have))

    def manifest(self) -> tuple[bytes, str]:
        """Of a holding that is whole: its encoding and its name. It is written beside the files."""
        files = []
        for number, (path, size) in enumerate(self.layout.files):
            hashes = b"".join(self.have[block] for block in self.layout.blocks(number))
            files.append(FileBlocks(path, size or 0, hashes))
        data, name = encode_manifest(Manifest(tuple(files)))
        fresh = self._path(f".{MANIFEST}")
        with open(fresh, "wb") as file:
            file.write(data)
        os.replace(fresh, self._path(MANIFEST))
        return data, name

    def close(self) -> None:
        os.close(self._index)

    # -- how -------------------------------------------------------------------------------

    def _path(self, *names: str) -> str:
        return os.path.join(self.folder, *names)

    def _final(self, file: int) -> str:
        return self._path(FILES, self.layout.files[file][0])

    def _finish(self, file: int) -> None:
        """It has all its blocks. A file without any is made here."""
        final = self._final(file)
        parent = os.path.dirname(final)
        if parent not in self._folders:
            os.makedirs(parent, mode=0o700, exist_ok=True)
            self._folders.add(parent)
        part = self._path(PARTS, str(file))
        if self.layout.files[file][1] == 0:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.replace(part, final)

    def _begin(self, header: bytes) -> None:
        for name in (FILES, PARTS):
            for place, _, _ in os.walk(self._path(name)):
                os.chmod(place, 0o700)  # it may have been whole, and so read-only
            shutil.rmtree(self._path(name), ignore_errors=True)
            os.mkdir(self._path(name), 0o700)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(MANIFEST))
        fresh = self._path(f".{INDEX}")
        with open(fresh, "wb") as file:
            file.write(len(header).to_bytes(NUMBER_BYTES) + header)
        os.replace(fresh, self._path(INDEX))
        for number, (_, size) in enumerate(self.layout.files):
            if size == 0:
                self._finish(number)

    def _continue(self, header: bytes, mark: str) -> bool:
        try:
            with open(self._path(INDEX), "rb") as file:
                length = int.from_bytes(file.read(NUMBER_BYTES))
                if length > HEADER_BYTES_MAX:
                    return False
                there = file.read(length)
                records = file.read()
            before = _decode(there)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return False
        if before.mark != mark or before.files != self.layout.files:
            return False
        doubted = there != header  # another boot of the machine wrote it
        for at in range(0, len(records) - RECORD_BYTES + 1, RECORD_BYTES):
            number = int.from_bytes(records[at : at + NUMBER_BYTES])
            if number < self.layout.count:
                self.have[number] = records[at + NUMBER_BYTES : at + RECORD_BYTES]
        if doubted:
            self.have = {one: name for one, name in self.have.items() if self._is_here(one, name)}
        for number in self.have:
            self._left[self.layout.span(number).file] -= 1
        self._rewrite(header)
        for number, left in enumerate(self._left):
            there_already = os.path.lexists(self._final(number))
            if not left and not there_already and self.layout.files[number][1] is not None:
                self._finish(number)
            elif left and there_already:
                os.replace(self._final(number), self._path(PARTS, str(number)))
        return True

    def _is_here(self, number: int, name: bytes) -> bool:
        with contextlib.suppress(OSError, IndexError):
            data = read(self.folder, self.layout, number)
            return hashlib.sha256(data).digest() == name
        return False

    def _rewrite(self, header: bytes) -> None:
        """Without what is doubted, or was cut off by a kill."""
        fresh = self._path(f".{INDEX}")
        with open(fresh, "wb") as file:
            file.write(len(header).to_bytes(NUMBER_BYTES) + header)
            for number, name in self.have.items():
                file.write(number.to_bytes(NUMBER_BYTES) + name)
        os.replace(fresh, self._path(INDEX))


def layout_of(folder: str, owner: int | None = None) -> Layout:
    """Of a holding that somebody else may have made. Raises OSError, ValueError."""
    handle = _open(folder, (INDEX,), owner)
    with open(handle, "rb") as file:
        length = int.from_bytes(file.read(NUMBER_BYTES))
        if length > HEADER_BYTES_MAX:
            raise ValueError("the list of its files is too long")
        layout = Layout(_decode(file.read(length)).files)
    if problem := layout.problem():
        raise ValueError(problem)
    return layout


def read(
    folder: str, layout: Layout, number: int, owner: int | None = None, *, plain: bool = False
) -> bytes:
    """A block, as it is on the disk. No link is followed, and with an `owner` a file of another
    user is not read. `plain`: the folder is not a holding, but has the files themselves. OSError,
    IndexError: it is not here."""
    span = layout.span(number)
    path, part = layout.files[span.file][0].split("/"), (PARTS, str(span.file))
    # It may become whole between two looks.
    for names in (path,) if plain else (part, (FILES, *path), part):
        with contextlib.suppress(FileNotFoundError):
            handle = _open(folder, names, owner)
            try:
                data = os.pread(handle, span.size, span.offset)
            finally:
                os.close(handle)
            if len(data) == span.size:
                return data
            raise OSError(f"block {number} is not here as a whole")
    raise FileNotFoundError(number)


def read_manifest(folder: str, owner: int | None = None) -> bytes:
    with open(_open(folder, (MANIFEST,), owner), "rb") as file:
        return file.read(HEADER_BYTES_MAX)


def _open(folder: str, names: Sequence[str], owner: int | None) -> int:
    """Of a plain file below the folder, without a link on the way."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    at = os.open(folder, flags | os.O_DIRECTORY)
    try:
        for name in names[:-1]:
            inner = os.open(name, flags | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        handle = os.open(names[-1], flags | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
    there = os.fstat(handle)
    if not stat.S_ISREG(there.st_mode) or (owner is not None and there.st_uid != owner):
        os.close(handle)
        raise PermissionError(f"{names[-1]} is not a file of this holding's user")
    return handle


def manifest_of(folder: Path | str, paths: Iterable[str]) -> Manifest:
    """Of files that are there already and that nobody changes meanwhile."""
    found = []
    for path in sorted(paths):
        hashes, size = [], 0
        with open(os.path.join(folder, path), "rb") as file:
            while data := file.read(BLOCK_BYTES):
                hashes.append(hashlib.sha256(data).digest())
                size += len(data)
        found.append(FileBlocks(path, size, b"".join(hashes)))
    return Manifest(tuple(found))


def _boot() -> str:
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text().strip()
    return ""
