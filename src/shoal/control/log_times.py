"""When output arrived: a small file beside each member's log, so that `--since` finds the place.

A mark is a time and how much output there was before it. All output up to the next mark arrived
within the spacing of marks, which grows with their number, so that the file stays small.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

MARK = struct.Struct("<qq")  # milliseconds, bytes
SPACING_MS = 5_000
MARKS_PER_SPACING = 4_096  # after that many marks they are twice as far apart, then three times
MARKS_MAX = 200_000  # more than a year of output


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


def offset_at(path: Path, since_ms: int, size: int) -> int:
    """`size`: of the log now. Without marks, all of it may be new."""
    try:
        data = path.with_suffix(".times").read_bytes()[: MARKS_MAX * MARK.size]
    except OSError:
        return 0
    whole = data[: len(data) // MARK.size * MARK.size]
    marks: list[tuple[int, int]] = list(MARK.iter_unpack(whole))
    for number, (at_ms, offset) in enumerate(marks):
        if since_ms < at_ms + _spacing_ms(number + 1):
            return min(offset, size)
    return size if marks else 0


def _spacing_ms(marks: int) -> int:
    return SPACING_MS * (1 + marks // MARKS_PER_SPACING)
