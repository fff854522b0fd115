"""Files that jobs have kept, as readers see them: listed, opened, and sent to nodes."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import msgspec

from shoal.model.kept import PIECE_BYTES, FileSent, FileWanted, KeptFile, Kind, path_problem

JOB_FOLDER = re.compile(r"j\d{1,15}(\.\d{1,15})?\Z")


class Index(msgspec.Struct):
    """`attempt`: the newest that has made a snapshot. `of`: the files of each node's."""

    attempt: int = 0
    of: dict[str, list[KeptFile]] = {}


class KeptFiles:
    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, job: str, kind: Kind) -> Path:
        return self.root / job / kind.value

    def listing(self, job: str, kind: Kind = Kind.OUTPUT) -> list[KeptFile]:
        if not JOB_FOLDER.match(job):
            return []
        folder = self.folder(job, kind)
        found = []
        for path in files_in(folder):
            with contextlib.suppress(OSError):
                seen = (folder / path).stat()
                found.append(KeptFile(path, seen.st_size, seen.st_mtime_ns // 1_000_000))
        return sorted(found, key=lambda file: file.path)

    def notes(self, job: str) -> list[str]:
        try:
            return msgspec.json.decode(
                (self.root / job / "notes.json").read_bytes(), type=list[str]
            )
        except (OSError, msgspec.DecodeError):
            return []

    def index(self, job: str) -> Index:
        try:
            return msgspec.json.decode((self.root / job / "index.json").read_bytes(), type=Index)
        except (OSError, msgspec.DecodeError):
            return Index()

    def open(self, job: str, path: str, kind: Kind = Kind.OUTPUT) -> int:
        """A descriptor. FileNotFoundError if there is no such file."""
        if path_problem(path) or not JOB_FOLDER.match(job):
            raise FileNotFoundError(path)
        return os.open(self.folder(job, kind) / path, os.O_RDONLY | os.O_NOFOLLOW)

    def sent(self, wanted: FileWanted) -> FileSent:
        """What a node that is to start a member gets of the job's folder."""
        ref, kind = wanted.ref, wanted.kind
        if not wanted.path:
            files, attempt = self.listing(ref.job, kind), self.index(ref.job).attempt
            return FileSent(ref, kind, files=tuple(files), attempt=attempt)
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


def files_in(folder: Path) -> list[str]:
    found: list[str] = []
    for here, _, names in os.walk(folder):
        inside = os.path.relpath(here, folder)
        found += [name if inside == "." else f"{inside}/{name}" for name in names]
    return found
