"""When output arrived: a small file beside each member's log, so that a time finds its place, a
line its time, and the output of several members can be read in the order in which it came.

A mark is a time and how much output there was before it. All output up to the next mark arrived
within the spacing of marks, which grows with their number, so that the file stays small.
"""

from __future__ import annotations

import os
import struct
import time
from bisect import bisect_right
from pathlib import Path

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
