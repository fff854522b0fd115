"""Lines of a member's output that contain a text. Plain text: a pattern could cost anything."""

from __future__ import annotations

from shoal.control.logs import LogStore, Read
from shoal.model.job import MemberRef

SEARCHED_MAX = 16 * 1024 * 1024  # in one request; the next one goes on from there


def matching(logs: LogStore, ref: MemberRef, offset: int, text: bytes, *, over: bool) -> Read:
    """As `LogStore.read`, with only the lines that match. A line that is not complete is left for
    later, unless the output is `over` or the line is longer than what is read at once."""
    start, found, searched = offset, b"", 0
    while not found and searched < SEARCHED_MAX:
        read = logs.read(ref, offset)
        if not read.data:
            return Read(start, b"", offset, read.size)
        end = read.data.rfind(b"\n") + 1
        if (over and read.next >= read.size) or (
            not end and read.next - read.start >= len(read.data) > 65_536
        ):
            end = len(read.data)
        if not end:
            return Read(start, found, offset, read.size)
        lines = read.data[:end].splitlines(keepends=True)
        found = b"".join(line for line in lines if text in line)
        whole = read.next - read.start == len(read.data)  # otherwise it stands for a gap
        offset = read.start + end if whole else read.next
        searched += end
        if offset >= read.size:
            return Read(start, found, offset, read.size)
    return Read(start, found, offset, logs.kept(ref))
