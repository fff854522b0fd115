"""Parts of the output of one member or of several, forward or backward from any place.

What several members wrote is put in the order in which it came, as far as that is known: a second
near the beginning of an attempt, a few seconds after hours (`control/log_times.py`). What came at
the same time is in the order of the members' numbers, and what has no known time comes first. The
lines of one member never change their order. Nothing here reads more than a part of a file.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

from shoal.api.log_find import Hit, Search
from shoal.api.log_source import Source
from shoal.control.logs import LogStore
from shoal.model.job import MemberRef
from shoal.model.views import LogPiece

PART_BYTES = 128 * 1024
PIECES_MAX = 1_000


class Part(NamedTuple):
    """`starts` and `ends`: from where to where each member was read."""

    pieces: list[LogPiece]
    starts: list[int]
    ends: list[int]


class Together:
    """The members that are shown, for one request."""

    def __init__(self, logs: LogStore, refs: Sequence[tuple[MemberRef, bool]]) -> None:
        self._stack = ExitStack()
        self.sources = [
            self._stack.enter_context(closing(Source(logs, ref, over=over))) for ref, over in refs
        ]

    def close(self) -> None:
        self._stack.close()

    @property
    def sizes(self) -> list[int]:
        return [one.size for one in self.sources]

    def span_ms(self) -> tuple[int, int]:
        """When the first and the last output came; zeros if no time is known."""
        known = [one.marks for one in self.sources if one.marks.count]
        if not known:
            return 0, 0
        return min(one.mark(0)[0] for one in known), max(
            one.mark(one.count - 1)[0] for one in known
        )

    # -- places ----------------------------------------------------------------------------------

    def at_time(self, since_ms: int) -> list[int]:
        return [one.line_start(one.marks.place(since_ms, one.size)) for one in self.sources]

    def at_share(self, share: float) -> list[int]:
        """Of one member's bytes; of several members' time, if it is known."""
        first_ms, last_ms = self.span_ms()
        if len(self.sources) == 1 or not last_ms:
            return [one.line_start(int(one.size * share)) for one in self.sources]
        return self.at_time(int(first_ms + (last_ms - first_ms) * share))

    def at_line(self, member: int, offset: int) -> list[int]:
        """A line of one member, and what the others wrote from then on."""
        of = next((one for one in self.sources if one.ref.member == member), self.sources[0])
        at_ms = of.marks.time_ms(offset)
        return [
            one.line_start(min(offset, one.size) if one is of else _first(one, at_ms, member))
            for one in self.sources
        ]

    # -- reading ---------------------------------------------------------------------------------

    def forward(self, places: Sequence[int]) -> Part:
        ends, pieces, left = list(places), list[LogPiece](), PART_BYTES
        queue = [(one.marks.time_ms(ends[at]), at) for at, one in enumerate(self.sources)]
        heapq.heapify(queue)
        while queue and left > 0 and len(pieces) < PIECES_MAX:
            at_ms, at = heapq.heappop(queue)
            one, begin = self.sources[at], ends[at]
            if begin >= one.size:
                continue
            until = one.marks.ahead(begin)
            read = one.read(begin, min(begin + left, until or one.size, one.size))
            pieces.append(one.piece(read))
            left -= len(read.data)
            ends[at] = read.next
            heapq.heappush(queue, (max(at_ms, one.marks.time_ms(read.next)), at))
        return Part(pieces, list(places), ends)

    def backward(self, places: Sequence[int]) -> Part:
        starts, pieces, left = list(places), list[LogPiece](), PART_BYTES
        queue = [(-one.marks.time_ms(starts[at] - 1), -at) for at, one in enumerate(self.sources)]
        heapq.heapify(queue)
        while queue and left > 0 and len(pieces) < PIECES_MAX:
            _, at = heapq.heappop(queue)
            at, end = -at, starts[-at]
            if end <= 0:
                continue
            one = self.sources[at]
            index = one.marks.index(end - 1)
            mark = one.marks.mark(index)[1] if index >= 0 else 0
            found = one.between(max(mark, end - left), end)
            pieces += [one.piece(read) for read in reversed(found)]
            left -= sum(len(read.data) for read in found)
            starts[at] = found[0].start
            heapq.heappush(queue, (-one.marks.time_ms(starts[at] - 1), -at))
        for at, one in enumerate(self.sources):  # whole lines
            begin = one.line_start(starts[at])
            if begin < starts[at]:
                mine = (i for i, p in enumerate(pieces) if p.member == one.ref.member)
                first = max(mine, default=len(pieces) - 1)
                more = [one.piece(read) for read in one.between(begin, starts[at])]
                pieces[first + 1 : first + 1] = reversed(more)
                starts[at] = begin
        return Part(pieces[::-1], starts, list(places))

    def matching(self, places: Sequence[int], search: Search, *, back: bool) -> Part:
        """Only lines that match, each a piece. What a request may search is bounded, so there may
        be none, and more to search."""
        moved, pieces = list(places), list[LogPiece]()
        searches = [_Hits(one, at, search, back=back) for at, one in enumerate(self.sources)]
        for one, place in zip(searches, places, strict=True):
            one.ahead = place
        sign = -1 if back else 1
        for at_ms, at, hit in heapq.merge(
            *(one.found() for one in searches), key=lambda told: (sign * told[0], sign * told[1])
        ):
            if hit is None or len(pieces) >= PIECES_MAX:
                break
            member = self.sources[at].ref.member
            pieces.append(
                LogPiece(
                    member=member,
                    offset=hit.offset,
                    next_offset=hit.offset + len(hit.line),
                    at_ms=at_ms,
                    data=hit.line,
                )
            )
            searches[at].taken = True
        moved = [one.reached() for one in searches]
        if back:
            return Part(pieces[::-1], moved, list(places))
        return Part(pieces, list(places), moved)


class _Hits:
    """The lines of one member that match, one after the other. `ahead`: no line before that place
    is left to tell."""

    def __init__(self, source: Source, at: int, search: Search, *, back: bool) -> None:
        self.source, self.at, self.search, self.back = source, at, search, back
        self.ahead = 0
        self.taken = True
        self._told: Hit | None = None

    def found(self) -> Iterator[tuple[int, int, Hit | None]]:
        time_ms, reads = self.source.marks.time_ms, self.search
        while True:
            if reads.spent:
                yield time_ms(max(0, self.ahead - self.back)), self.at, None
                return
            place = self.ahead
            if self.back:
                hits, then = reads.before(self.source, place)
                hits.reverse()
            else:
                hits, then = reads.after(self.source, place)
            for hit in hits:
                self._told, self.taken = hit, False
                yield time_ms(hit.offset), self.at, hit
                self.ahead = hit.offset if self.back else hit.offset + len(hit.line)
            self._told, self.ahead = None, then
            if then == place:
                return

    def reached(self) -> int:
        if self._told is None:
            return self.ahead
        end = self._told.offset + len(self._told.line)
        return (
            (self._told.offset if self.taken else end)
            if self.back
            else (end if self.taken else self._told.offset)
        )


def _first(one: Source, at_ms: int, member: int) -> int:
    """Where the output begins that is not before what this member wrote then."""
    marks, line = one.marks, (at_ms, member)
    if not marks.count:
        return one.size if (0, one.ref.member) < line else 0
    at = bisect_left(range(marks.count), line, key=lambda at: (marks.mark(at)[0], one.ref.member))
    return marks.mark(at)[1] if at < marks.count else one.size
