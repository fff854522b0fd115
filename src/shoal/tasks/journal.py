"""Writes the output of `shoal map`: complete and in order, even if the process is killed.

OUTPUT.part has the output lines in input order, as far as they are known. OUTPUT.journal names the
input, and has marks (the number of inputs and bytes in the part) and results that are ahead of
their turn. At the end the part becomes OUTPUT.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from shoal.machine.files import lock

JOURNAL_BYTES_MAX = 64 << 20  # a longer one starts again as soon as no result waits


class Identity(msgspec.Struct, frozen=True):
    """Identifies the input and the function: a journal continues only with the same ones.
    `on_error` may change while nothing has failed."""

    lines: int
    size_bytes: int
    digest: str
    function: str
    on_error: str


class Mark(msgspec.Struct, frozen=True, tag="mark"):
    done: int  # inputs whose results are in the part
    written: int  # bytes in the part
    failed: int


class Ahead(msgspec.Struct, frozen=True, tag="ahead"):
    """Followed by `size` bytes of output."""

    first: int
    length: int
    size: int
    failed: int


class OnErrorChanged(msgspec.Struct, frozen=True, tag="turned"):
    """From here on, another `--on-error` applies."""

    on_error: str


class JournalError(Exception):
    """Cannot write here; the message has the reason and the fix."""


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
                raise JournalError(f"{what}; remove both to start again")
        except BaseException:
            self.close()
            raise
        self._part.truncate(self._written)
        self._journal.truncate(end)
        self._journal.seek(end)
        if end == 0:
            self._begin()
        elif self._read_on_error != identity.on_error:
            _write(self._journal, msgspec.json.encode(OnErrorChanged(identity.on_error)) + b"\n")
        self._begun = True

    @property
    def known(self) -> int:
        """The number of inputs that have results."""
        return self.done + sum(entry.length for entry, _ in self._ahead.values())

    def gaps(self, total: int) -> list[tuple[int, int]]:
        """Ranges of inputs without results."""
        gaps, start = [], self.done
        for first, (entry, _) in sorted(self._ahead.items()):
            if first > start:
                gaps.append((start, first))
            start = first + entry.length
        return [*gaps, (start, total)] if start < total else gaps

    def waiting_bytes(self) -> int:
        return sum(entry.size for entry, _ in self._ahead.values())

    def add(self, first: int, length: int, data: bytes, failed: int = 0) -> None:
        """Add the output of `length` inputs from `first` on."""
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
        """The output is complete: rename the part."""
        os.fsync(self._part.fileno())
        self._part_path.rename(self._output)
        self._path.unlink()
        self.close()

    def close(self) -> None:
        """Removes an empty journal, which would only block another map with the same output."""
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
        """One write, so that a journal without a whole first line is empty."""
        self._journal.seek(0)
        self._journal.truncate(0)
        _write(self._journal, msgspec.json.encode(self._identity) + b"\n" + self._mark())

    def _read(self) -> int:
        """Reads what an earlier run left; returns where the last whole entry ends."""
        with self._path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                return 0  # killed while it wrote the first line
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
                    entry = msgspec.json.decode(line, type=Mark | Ahead | OnErrorChanged)
                except msgspec.DecodeError:
                    break
                if isinstance(entry, Mark):
                    self.done, self._written, self.failed = entry.done, entry.written, entry.failed
                elif isinstance(entry, OnErrorChanged):
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
        """Results do not depend on `--on-error`, but the output for a failure does."""
        before, asked = self._read_on_error, self._identity.on_error
        failed = self.failed + sum(entry.failed for entry, _ in self._ahead.values())
        if failed and before != asked:
            raise JournalError(
                f"{self._path}: already has {failed} failed lines from --on-error {before}; "
                f"use that again, or {_start_again(self._path)}"
            )


def _mismatch(path: Path, found: Identity, asked: Identity) -> str:
    what = "another function" if found.function != asked.function else "another input"
    return f"{path}: belongs to a map with {what}; {_start_again(path)}"


def _start_again(path: Path) -> str:
    return f"remove it and {path.stem}.part to start again, or name another output"


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
