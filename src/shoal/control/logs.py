"""The members' output as the controller keeps it, so that logs outlive nodes.

There is one file for each member, and every byte in it is where the member wrote it. Output that is
not kept is a hole in that file: bytes that the node had to drop, or the middle of long output. So
two heads that write the same output, because one took over from the other, write the same bytes at
the same place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import time
from bisect import bisect_right
from collections.abc import Callable, Container
from pathlib import Path
from typing import NamedTuple, TypeVar

from shoal.machine.kernel import punch_hole
from shoal.machine.paths import ask
from shoal.model.job import MemberRef
from shoal.model.report import LogChunk

# When output arrived: a small file beside each member's log, so that a time finds its place, a line
# its time, and the output of several members can be read in the order in which it came.
#
# A mark is a time and how much output there was before it. All output up to the next mark arrived
# within the spacing of marks, which grows with their number, so that the file stays small.


MARK = struct.Struct("<qq")  # milliseconds, bytes
FINE_MS = 1_000  # between the first marks
SPACING_MS = 5_000  # then; earlier releases began with it
MARKS_PER_SPACING = 4_096  # after that many marks they are further apart: 1 s, 5 s, 10 s, 15 s
MARKS_MAX = 200_000  # some nine months of output without a pause


def wall_ms() -> int:
    return int(time.time() * 1000)


def note_time(path: Path, size: int, now_ms: int) -> None:
    """Called before output is added to a log of this size. `now_ms` is the cluster's time, which
    may differ from this machine's. A disk that is full has no marks."""
    place = path.with_suffix(".times")
    try:
        status = place.stat()
        marks = status.st_size // MARK.size
        if wall_ms() - status.st_mtime_ns // 1_000_000 < _spacing_ms(marks) or marks >= MARKS_MAX:
            return
    except OSError:
        pass
    try:
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, MARK.pack(now_ms, size))
        finally:
            os.close(handle)
    except OSError:
        return


class Marks:
    """The marks of one log, read where they are needed. Without marks, no time is known."""

    def __init__(self, path: Path) -> None:
        try:
            self._handle = os.open(path.with_suffix(".times"), os.O_RDONLY)
        except OSError:
            self._handle = -1
        size = os.fstat(self._handle).st_size if self._handle >= 0 else 0
        self.count = min(size // MARK.size, MARKS_MAX)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def mark(self, index: int) -> tuple[int, int]:
        """Its time, and the output before it."""
        at_ms, offset = MARK.unpack(os.pread(self._handle, MARK.size, index * MARK.size))
        return at_ms, offset

    def index(self, offset: int) -> int:
        """The mark that counts for the byte there; -1: none does."""
        return bisect_right(range(self.count), offset, key=lambda index: self.mark(index)[1]) - 1

    def time_ms(self, offset: int) -> int:
        """When the byte there came, to within the spacing; 0 if that is not known."""
        index = self.index(offset)
        return self.mark(index)[0] if index >= 0 else 0

    def ahead(self, offset: int) -> int | None:
        """Where the next mark is."""
        index = self.index(offset) + 1
        return self.mark(index)[1] if index < self.count else None

    def place(self, since_ms: int, size: int) -> int:
        """Where the output begins that came since then. Without marks, all of it may be new."""
        if not self.count:
            return 0
        index = bisect_right(range(self.count), since_ms, key=self._covered_ms)
        return min(self.mark(index)[1], size) if index < self.count else size

    def _covered_ms(self, index: int) -> int:
        """Until when its output may have come, also if an earlier release wrote the mark."""
        return self.mark(index)[0] + SPACING_MS * (1 + (index + 1) // MARKS_PER_SPACING)


def _spacing_ms(marks: int) -> int:
    return SPACING_MS * (marks // MARKS_PER_SPACING) or FINE_MS


# A member that prints without end must not fill the controller's disk. The beginning says what
# was meant to happen, and the end how it ended.
HEAD_BYTES = 128 * 1024 * 1024
TAIL_BYTES = 128 * 1024 * 1024
CUT_BYTES = 8 * 1024 * 1024  # the middle is cut each time this much has been added
READ_BYTES_MAX = 256 * 1024
GAPS_MAX = 10_000  # looked at for one that a reader meets from behind
REMOVED = ".removed"


T = TypeVar("T")


class Read(NamedTuple):
    """`data` is the output from `start` to `next`, of `size` bytes so far. Where nothing is kept,
    `data` is a line that says so."""

    start: int
    data: bytes
    next: int
    size: int


class LogStore:
    def __init__(self, root: Path, now_ms: Callable[[], int] = wall_ms) -> None:
        self.root = root
        self._now_ms = now_ms
        self.short: Container[str] = ()  # jobs whose logs are kept short, to save room
        with contextlib.suppress(OSError):
            shutil.rmtree(root / REMOVED)  # of a controller that was killed

    def _ask(self, function: Callable[..., T], *args: object) -> T:
        """The heads' shared folder may hang, and these are called by a loop."""
        return ask((str(self.root),), function, *args)

    def append(self, chunk: LogChunk) -> int:
        """Returns how far the output is kept; a piece that would leave a gap is not taken."""
        return self._ask(self._append, chunk)

    def _append(self, chunk: LogChunk) -> int:
        path = self._path(chunk.ref)
        size = path.stat().st_size if path.exists() else 0
        end = chunk.offset + len(chunk.data)
        if chunk.offset - chunk.dropped > size or not (chunk.data or chunk.dropped):
            return size
        path.parent.mkdir(parents=True, exist_ok=True)
        note_time(path, size, self._now_ms())
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _write(handle, chunk.data, chunk.offset)
            if end > size and not chunk.data:
                # It never makes a file shorter, to which the next head may have added meanwhile.
                os.posix_fallocate(handle, end - 1, 1)
            short = chunk.ref.job in self.short
            head, tail = (CUT_BYTES, CUT_BYTES) if short else (HEAD_BYTES, TAIL_BYTES)
            if end > head + tail and end // CUT_BYTES > size // CUT_BYTES:
                cut = (end - tail) // CUT_BYTES * CUT_BYTES
                if cut > head:
                    punch_hole(handle, head, cut)
        finally:
            os.close(handle)
        return max(size, end)

    def kept(self, ref: MemberRef) -> int:
        """How far the output is kept; 0 if that cannot be read now. It takes no descriptor."""
        try:
            return self._ask(os.stat, self._path(ref)).st_size
        except OSError:
            return 0

    def read(self, ref: MemberRef, offset: int, most: int = 0) -> Read:
        """From `offset` on; negative: from the end. `most`: so many bytes at most."""
        return self._ask(self._read, ref, offset, most)

    def _read(self, ref: MemberRef, offset: int, most: int) -> Read:
        try:
            handle = os.open(self._path(ref), os.O_RDONLY)
        except FileNotFoundError:
            return Read(0, b"", 0, 0)
        try:
            status = os.fstat(handle)
            size = status.st_size
            start = max(0, size + offset) if offset < 0 else min(offset, size)
            most = min(most, READ_BYTES_MAX) if most else READ_BYTES_MAX
            if status.st_blocks * 512 < size and start < size:
                there = _data_from(handle, start, size)
                if there > start and offset >= 0:
                    return Read(start, _notice(there - start), there, size)
                start = there
                most = min(most, _data_to(handle, start, size) - start)
            data = os.pread(handle, most, start)
            return Read(start, data, start + len(data), size)
        finally:
            os.close(handle)

    def offset_at(self, ref: MemberRef, since_ms: int) -> int:
        """Where the output begins that came since then, to within a few seconds."""
        with contextlib.closing(self.marks(ref)) as marks:
            return marks.place(since_ms, self.kept(ref))

    def marks(self, ref: MemberRef) -> Marks:
        return self._ask(Marks, self._path(ref))

    def gap_begin(self, ref: MemberRef, offset: int) -> int:
        """Where the gap begins that the byte there is a part of; `offset` if it is in none."""
        return self._ask(self._gap_begin, ref, offset)

    def _gap_begin(self, ref: MemberRef, offset: int) -> int:
        try:
            handle = os.open(self._path(ref), os.O_RDONLY)
        except FileNotFoundError:
            return offset
        try:
            size = os.fstat(handle).st_size
            there = 0
            for _ in range(GAPS_MAX):
                begin = _data_to(handle, there, size)
                if begin > offset:
                    return offset
                there = _data_from(handle, begin, size)
                if there > offset:
                    return begin
            return offset
        finally:
            os.close(handle)

    def drop(self, job_id: str) -> None:
        """A reader sees the whole log or none, also if the controller dies in between."""
        folder = self.folder(job_id)
        if not folder.exists():
            return
        try:
            (self.root / REMOVED).mkdir(exist_ok=True)
            folder = folder.rename(self.root / REMOVED / job_id)
        except OSError:
            pass  # a full disk may have no room for the new folder, but has for less
        shutil.rmtree(folder, ignore_errors=True)

    def folder(self, job_id: str) -> Path:
        return self.root / job_id

    def _path(self, ref: MemberRef) -> Path:
        return self.root / ref.job / f"{ref.attempt}.{ref.member}.log"


def _write(handle: int, data: bytes, offset: int) -> None:
    """Write all of it: a disk that is nearly full takes only a part, without an error."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(handle, rest, offset)
        rest, offset = rest[count:], offset + count


def _notice(dropped: int) -> bytes:
    return f"\n[shoal: {dropped:,} bytes of output are not kept here]\n".encode()


def _data_from(handle: int, offset: int, size: int) -> int:
    try:
        return os.lseek(handle, offset, os.SEEK_DATA)
    except OSError:  # nothing but a hole up to the end
        return size


def _data_to(handle: int, offset: int, size: int) -> int:
    try:
        return os.lseek(handle, offset, os.SEEK_HOLE)
    except OSError:
        return size
