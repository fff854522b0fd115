"""Lines in the output of members: those with a text, or those that look like errors.

A text is plain, because a pattern could cost anything. Small and capital letters (of ASCII) are the
same, and colors in a line do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

from shoal.control.logs import LogStore, Read
from shoal.model.job import MemberRef
from shoal.model.views import LogPiece, LogPlace

SEARCHED_MAX = 32 * 1024 * 1024  # in one request; the next one goes on from there
CHUNK_BYTES = 256 * 1024
HITS_MAX = 1_000
MEMBER_COSTS = 16 * 1024  # to open its files counts as much as to read this

# What programs say when they fail. docs/page.md has this list.
ERROR = re.compile(
    rb"Traceback \(most recent call last\)|(?:Error|Exception)(?:: |[:\r]*$)|: error: "
    rb"|\bERROR\b|\bFATAL\b|\bCRITICAL\b|fatal error|CUDA error|out of memory|NCCL (?:WARN|error)"
    rb"|nccl\w+Error|Segmentation fault|Bus error|core dumped|^panic: |Assertion .{0,200}failed",
    re.MULTILINE,
)
# One of these is in each of them: they are found faster than a pattern.
HINTS = (
    *(b"Traceback (", b"rror", b"Exception", b"ERROR", b"FATAL", b"CRITICAL", b"out of memory"),
    *(b"NCCL ", b"Segmentation fault", b"core dumped", b"panic: ", b"Assertion"),
)
COLOR = re.compile(rb"\x1b\[[0-9;:]*m")


class Hit(NamedTuple):
    offset: int
    line: bytes


class Search:
    """For one request: `left` is how much it may still read. Without a text: for errors."""

    def __init__(self, text: bytes) -> None:
        self._text = text.lower()
        self.left = SEARCHED_MAX

    @property
    def spent(self) -> bool:
        return self.left <= 0

    def after(self, source: Source, place: int) -> tuple[list[Hit], int]:
        """In the next chunk, and where the one after it begins. A line that is not complete is
        left for later, unless no more can come."""
        if place >= source.size:
            return [], place
        read = source.read(place, place + CHUNK_BYTES)
        self.left -= max(1, len(read.data))
        if read.next - read.start != len(read.data):  # a gap
            return [], read.next
        whole = read.data.rfind(b"\n") + 1
        last = source.over if read.next >= source.size else read.next < place + CHUNK_BYTES
        if last or (not whole and len(read.data) > LINE_BYTES):
            whole = len(read.data)
        return self._hits(place, read.data[:whole]), place + whole

    def before(self, source: Source, place: int) -> tuple[list[Hit], int]:
        """In the chunk that ends there, and where it begins."""
        if place <= 0:
            return [], 0
        hits: list[Hit] = []
        reads = source.between(max(0, place - CHUNK_BYTES), place)
        begin = reads[0].start
        self.left -= max(1, sum(len(read.data) for read in reads))
        for read in reads:
            if read.next - read.start != len(read.data):
                continue
            skipped = 0
            if read.start == begin and source.line_start(begin) != begin:
                skipped = read.data.find(b"\n") + 1  # of a line that the chunk before has
                skipped = 0 if begin + skipped >= place else skipped
                begin += skipped
            hits += self._hits(read.start + skipped, read.data[skipped:])
        return hits, begin

    def _hits(self, offset: int, data: bytes) -> list[Hit]:
        if not self._text and not any(hint in data for hint in HINTS):
            return []
        if b"\x1b" in data:
            found, at = [], offset
            for line in _lines(data):
                if self._in(COLOR.sub(b"", line)):
                    found.append(Hit(at, line))
                at += len(line)
            return found
        return self._plain(offset, data)

    def _in(self, line: bytes) -> bool:
        return self._text in line.lower() if self._text else ERROR.search(line) is not None

    def _plain(self, offset: int, data: bytes) -> list[Hit]:
        found, at, low = list[Hit](), 0, data.lower() if self._text else data
        while True:
            if self._text:
                place = low.find(self._text, at)
            else:
                told = ERROR.search(low, at)
                place = told.start() if told else -1
            if place < 0:
                return found
            begin = data.rfind(b"\n", 0, place) + 1
            end = data.find(b"\n", place) + 1 or len(data)
            found.append(Hit(offset + begin, data[begin:end]))
            at = end


def _lines(data: bytes) -> list[bytes]:
    """Unlike `splitlines`, only at the ends of lines: a progress bar is one line."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


class Found(NamedTuple):
    """`at`, `offset`: which member to go on with, and from where."""

    hits: list[LogPlace]
    at: int
    offset: int


def find(
    logs: LogStore, refs: Sequence[tuple[MemberRef, bool]], text: bytes, at: int, offset: int
) -> Found:
    """All lines with the text; of errors, the first of each member."""
    search, hits = Search(text), list[LogPlace]()
    while at < len(refs):
        ref, over = refs[at]
        with closing(Source(logs, ref, over=over)) as source:
            while not (search.spent or len(hits) >= HITS_MAX):
                lines, then = search.after(source, offset)
                for line in lines if text else lines[:1]:
                    at_ms = source.marks.time_ms(line.offset)
                    hits.append(LogPlace(member=ref.member, offset=line.offset, at_ms=at_ms))
                if then == offset or (lines and not text):
                    at, offset = at + 1, 0
                    break
                offset = then
            else:
                return Found(hits, at, offset)
        search.left -= MEMBER_COSTS
    return Found(hits, at, offset)


# The output of one member, read at any place, with the times at which it came.


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


# Lines of a member's output that contain a text. Plain text: a pattern could cost anything.


RANGES_SEARCHED_MAX = 16 * 1024 * 1024  # in one request; the next one goes on from there


def matching(logs: LogStore, ref: MemberRef, offset: int, text: bytes, *, over: bool) -> Read:
    """As `LogStore.read`, with only the lines that match. A line that is not complete is left for
    later, unless the output is `over` or the line is longer than what is read at once."""
    start, found, searched = offset, b"", 0
    while not found and searched < RANGES_SEARCHED_MAX:
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
