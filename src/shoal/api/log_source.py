"""The output of one member, read at any place, with the times at which it came."""

from __future__ import annotations

from shoal.control.logs import LogStore, Read
from shoal.model.job import MemberRef
from shoal.model.views import LogPiece

LINE_BYTES = 64 * 1024  # a longer line may be shown in two parts


class Source:
    """The output of one member as it is now."""

    def __init__(self, logs: LogStore, ref: MemberRef, *, over: bool) -> None:
        self.logs, self.ref, self.over = logs, ref, over
        self.marks = logs.marks(ref)
        self.size = logs.kept(ref)

    def close(self) -> None:
        self.marks.close()

    def read(self, offset: int, end: int) -> Read:
        """A gap is one piece, however long it is."""
        return self.logs.read(self.ref, offset, max(1, min(end, self.size) - offset))

    def piece(self, read: Read) -> LogPiece:
        return LogPiece(
            member=self.ref.member,
            offset=read.start,
            next_offset=read.next,
            at_ms=self.marks.time_ms(read.start),
            data=read.data,
        )

    def line_start(self, offset: int) -> int:
        """Where the line begins that the byte there is a part of."""
        offset = min(offset, self.size)
        first = max(0, offset - LINE_BYTES)
        data = self.logs.read(self.ref, first, offset - first).data if offset > first else b""
        found = data[: offset - first].rfind(b"\n") + 1
        return first + found if found else (first if first == 0 else offset)

    def between(self, begin: int, end: int) -> list[Read]:
        """What there is from `begin` to `end`; a gap that `begin` is in is told as a whole."""
        found: list[Read] = []
        begin = self.logs.gap_begin(self.ref, begin)
        while begin < end:
            read = self.read(begin, end)
            if read.next <= begin:
                break
            begin = min(read.next, end)
            found.append(read._replace(next=begin))
        return found or [Read(begin, b"", end, self.size)]
