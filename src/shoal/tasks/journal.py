"""The output of `shoal map` while it grows: whole and in order, whoever is killed meanwhile.

Beside OUTPUT stand OUTPUT.part, the lines in input order as far as they are known, and
OUTPUT.journal: which input it belongs to, marks (so many inputs are in the part, so many bytes),
and results that came ahead of their turn. When all is done the part becomes the output.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from shoal.files import lock

JOURNAL_BYTES_MAX = 64 << 20  # past this it is begun anew as soon as nothing waits for its turn


class Identity(msgspec.Struct, frozen=True):
    """Of the input, and of what is made of it: a journal goes on only with the same. Another
    `on_error` is fine as long as nothing has failed."""

    lines: int
    size_bytes: int
    digest: str
    function: str
    on_error: str


class Mark(msgspec.Struct, frozen=True, tag="mark"):
    done: int  # inputs whose results are in the part
    written: int  # its bytes
    failed: int


class Ahead(msgspec.Struct, frozen=True, tag="ahead"):
    """Followed by so many bytes of output."""

    first: int
    length: int
    size: int
    failed: int


class Turned(msgspec.Struct, frozen=True, tag="turned"):
    """From here on another `--on-error` holds."""

    on_error: str


class JournalError(Exception):
    """Cannot write here; the message says why, and what to do."""


class Journal:
    def __init__(self, output: Path, identity: Identity) -> None:
        self._output = output
        self._part_path = output.with_name(f"{output.name}.part")
        self._path = output.with_name(f"{output.name}.journal")
        self._identity = identity
        self.done = 0
        self.failed = 0
        self._ahead: dict[int, tuple[Ahead, bytes]] = {}
        self._written = 0
        self._begun = False
        self._read_on_error = identity.on_error
        if output.exists():
            raise JournalError(f"{output}: exists already; remove it, or name another output")
        if self._part_path.exists() and not self._path.exists():
            what = f"{self._part_path}: exists without its journal"
            raise JournalError(f"{what}; remove it, or name another output")
        self._lock = lock(self._path)
        if self._lock is None:
            raise JournalError(f"{output}: another `shoal map` is writing it")
        self._journal: BinaryIO = self._path.open("r+b", buffering=0)
        try:
            end = self._read()
            self._part: BinaryIO = self._part_path.open("ab", buffering=0)
            if os.fstat(self._part.fileno()).st_size < self._written:
                what = f"{self._part_path}: is shorter than its journal says"
                raise JournalError(f"{what}; remove both to begin anew")
        except BaseException:
            self.close()
            raise
        self._part.truncate(self._written)
        self._journal.truncate(end)
        self._journal.seek(end)
        if end == 0:
            self._begin()
        elif self._read_on_error != identity.on_error:
            _write(self._journal, msgspec.json.encode(Turned(identity.on_error)) + b"\n")
        self._begun = True

    @property
    def known(self) -> int:
        """Inputs that need not be run again."""
        return self.done + sum(entry.length for entry, _ in self._ahead.values())

    def gaps(self, total: int) -> list[tuple[int, int]]:
        """From where to where inputs have no result yet."""
        gaps, start = [], self.done
        for first, (entry, _) in sorted(self._ahead.items()):
            if first > start:
                gaps.append((start, first))
            start = first + entry.length
        return [*gaps, (start, total)] if start < total else gaps

    def waiting_bytes(self) -> int:
        return sum(entry.size for entry, _ in self._ahead.values())

    def add(self, first: int, length: int, data: bytes, failed: int = 0) -> None:
        """The output of some neighbours. What was added is not asked for again."""
        entry = Ahead(first, length, len(data), failed)
        if first != self.done:
            _write(self._journal, msgspec.json.encode(entry) + b"\n" + data)
            self._ahead[first] = entry, data
            return
        self._append(entry, data)
        while self.done in self._ahead:
            self._append(*self._ahead.pop(self.done))
        if not self._ahead and self._journal.tell() > JOURNAL_BYTES_MAX:
            self._begin()
        _write(self._journal, self._mark())

    def finish(self) -> None:
        """All is there: the part is the output from now on."""
        os.fsync(self._part.fileno())
        self._part_path.rename(self._output)
        self._path.unlink()
        self.close()

    def close(self) -> None:
        """What holds nothing would only be in the way of another map with the same output."""
        if self._lock is not None and self._path.exists() and not self.known and self._begun:
            self._part_path.unlink(missing_ok=True)
            self._path.unlink()
        for file in (getattr(self, "_part", None), self._journal):
            if file is not None:
                file.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _append(self, entry: Ahead, data: bytes) -> None:
        _write(self._part, data)
        self._written += len(data)
        self.done += entry.length
        self.failed += entry.failed

    def _mark(self) -> bytes:
        return msgspec.json.encode(Mark(self.done, self._written, self.failed)) + b"\n"

    def _begin(self) -> None:
        """One write, so that a journal without its first line holds nothing at all."""
        self._journal.seek(0)
        self._journal.truncate(0)
        _write(self._journal, msgspec.json.encode(self._identity) + b"\n" + self._mark())

    def _read(self) -> int:
        """What an earlier run left; returns where its last whole entry ends."""
        with self._path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                return 0  # killed while it began
            try:
                found = msgspec.json.decode(first, type=Identity)
            except msgspec.DecodeError:
                raise JournalError(f"{self._path}: is not a journal of `shoal map`") from None
            self._read_on_error = found.on_error
            if msgspec.structs.replace(found, on_error=self._identity.on_error) != self._identity:
                raise JournalError(_mismatch(self._path, found, self._identity))
            end = file.tell()
            while (line := file.readline()).endswith(b"\n"):
                try:
                    entry = msgspec.json.decode(line, type=Mark | Ahead | Turned)
                except msgspec.DecodeError:
                    break
                if isinstance(entry, Mark):
                    self.done, self._written, self.failed = entry.done, entry.written, entry.failed
                elif isinstance(entry, Turned):
                    self._read_on_error = entry.on_error
                else:
                    data = file.read(entry.size)
                    if len(data) < entry.size:
                        break
                    self._ahead[entry.first] = entry, data
                end = file.tell()
        self._ahead = {at: kept for at, kept in self._ahead.items() if at >= self.done}
        self._refuse_other_failures()
        return end

    def _refuse_other_failures(self) -> None:
        """Results are the same under every `--on-error`; what stands for a failure is not."""
        before, asked = self._read_on_error, self._identity.on_error
        failed = self.failed + sum(entry.failed for entry, _ in self._ahead.values())
        if failed and before != asked:
            raise JournalError(
                f"{self._path}: {failed} failed lines are done with --on-error {before} already; "
                f"go on with that, or {_begin_anew(self._path)}"
            )


def _mismatch(path: Path, found: Identity, asked: Identity) -> str:
    what = "another function" if found.function != asked.function else "another input"
    return f"{path}: belongs to a map with {what}; {_begin_anew(path)}"


def _begin_anew(path: Path) -> str:
    return f"remove it and {path.stem}.part to begin anew, or name another output"


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
