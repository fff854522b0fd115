"""Files that jobs have kept, as readers see them: listed, opened, and sent to nodes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.machine.paths import ask
from shoal.model.blocks import Manifest, decode_manifest
from shoal.model.kept import (
    PIECE_BYTES,
    FileSent,
    FileWanted,
    KeptFile,
    Kind,
    path_problem,
)

T = TypeVar("T")

JOB_FOLDER = re.compile(r"j\d{1,15}(\.\d{1,15})?\Z")


SNAPSHOTS, MANIFESTS = "snapshots", "manifests"
INDEXES_MAX = 16  # read for each piece of a file that a node fetches


class Copy(msgspec.Struct, frozen=True):
    """Files that nodes hold. `manifest`: its name; it is in `manifests` of the job's folder."""

    manifest: str
    size: int
    holders: tuple[str, ...]


class Index(msgspec.Struct, frozen=True):
    """What counts as the job's checkpoints: files come and go around it, and this one file switches
    from a snapshot to the next. `attempt`: the newest that has made one. `of`: the files of each
    node's. `number`: of the newest. `at`: the number of the snapshot that each file came with; one
    that is not there is in `checkpoint`, where earlier versions put it. `held`: who
    has its files, of nodes whose files are not here."""

    attempt: int = 0
    of: dict[str, list[KeptFile]] = {}
    number: int = 0
    at: dict[str, int] = {}
    held: dict[str, Copy] = {}

    def place(self, path: str) -> str:
        number = self.at.get(path)
        return f"{Kind.CHECKPOINT.value if number is None else f'{SNAPSHOTS}/{number}'}/{path}"

    def paths(self) -> set[str]:
        return {file.path for files in self.of.values() for file in files}


class KeptFiles:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._indexes: dict[str, tuple[tuple[int, int, int], Index]] = {}

    def output(self, job: str) -> Path:
        return self.root / job / Kind.OUTPUT.value

    def listing(self, job: str, kind: Kind = Kind.OUTPUT) -> list[KeptFile]:
        if not JOB_FOLDER.match(job):
            return []
        if kind is Kind.CHECKPOINT:
            return self._checkpoints(job, self.index(job))
        return stats_of({path: self.output(job) / path for path in files_in(self.output(job))})

    def _checkpoints(self, job: str, index: Index) -> list[KeptFile]:
        held = {file.path: file for node in index.held for file in index.of.get(node, ())}
        here = index.paths() - held.keys()
        found = stats_of({path: self.root / job / index.place(path) for path in here})
        return sorted([*found, *held.values()], key=lambda file: file.path)

    def _ask(self, function: Callable[..., T], *args: object) -> T:
        """The heads' shared folder may hang, and a loop asks these."""
        return ask((str(self.root),), function, *args)

    def manifest(self, job: str, copy: Copy) -> Manifest:
        path = self.root / job / MANIFESTS / copy.manifest
        return decode_manifest(self._ask(path.read_bytes))

    def notes(self, job: str) -> list[str]:
        try:
            data = self._ask((self.root / job / "notes.json").read_bytes)
            return msgspec.json.decode(data, type=list[str])
        except (OSError, msgspec.DecodeError):
            return []

    def index(self, job: str) -> Index:
        """OSError: it may be there, and cannot be read now."""
        return self._ask(self._index, job)

    def _index(self, job: str) -> Index:
        path = self.root / job / "index.json"
        try:
            seen = path.stat()
            version = (seen.st_ino, seen.st_mtime_ns, seen.st_size)
            known = self._indexes.get(job)
            if known is None or known[0] != version:
                known = version, msgspec.json.decode(path.read_bytes(), type=Index)
                while len(self._indexes) >= INDEXES_MAX:
                    self._indexes.pop(next(iter(self._indexes)), None)
                self._indexes[job] = known
            return known[1]
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return Index()

    def open(self, job: str, path: str, kind: Kind = Kind.OUTPUT) -> int:
        """A descriptor. FileNotFoundError if there is no such file."""
        if path_problem(path) or not JOB_FOLDER.match(job):
            raise FileNotFoundError(path)
        if kind is Kind.OUTPUT:
            place = self.output(job) / path
        else:
            index = self.index(job)
            if path not in index.at and path not in index.paths():
                raise FileNotFoundError(path)
            place = self.root / job / index.place(path)
        return os.open(place, os.O_RDONLY | os.O_NOFOLLOW)

    def sent(self, wanted: FileWanted) -> FileSent:
        """What a node that is to start a member gets of the job's folder. Hangs: nobody knows."""
        return self._ask(self._sent, wanted)

    def _sent(self, wanted: FileWanted) -> FileSent:
        ref, kind = wanted.ref, wanted.kind
        index = self.index(ref.job)
        if not wanted.path:
            files = tuple(
                self._checkpoints(ref.job, index)
                if kind is Kind.CHECKPOINT
                else self.listing(ref.job, kind)
            )
            return FileSent(ref, kind, files=files, attempt=index.attempt, snapshot=index.number)
        if wanted.snapshot and wanted.snapshot != index.number:
            problem = "a newer snapshot has come"
            return FileSent(ref, kind, wanted.path, wanted.offset, problem=problem)
        try:
            handle = self.open(ref.job, wanted.path, kind)
        except OSError as error:
            problem = f"the head cannot read {wanted.path}: {error.strerror}"
            return FileSent(ref, kind, wanted.path, wanted.offset, problem=problem)
        try:
            data = os.pread(handle, PIECE_BYTES, max(0, wanted.offset))
            return FileSent(ref, kind, wanted.path, wanted.offset, data)
        finally:
            os.close(handle)


def stats_of(places: dict[str, Path]) -> list[KeptFile]:
    found = []
    for path, place in sorted(places.items()):
        with contextlib.suppress(OSError):
            seen = place.stat()
            found.append(KeptFile(path, seen.st_size, seen.st_mtime_ns // 1_000_000))
    return found


def files_in(folder: Path) -> list[str]:
    found: list[str] = []
    for here, _, names in os.walk(folder):
        inside = os.path.relpath(here, folder)
        found += [name if inside == "." else f"{inside}/{name}" for name in names]
    return found
