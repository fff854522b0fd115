"""The API of a job's output: one member's as it is, or any part of several members' in order."""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Annotated, NamedTuple

from msgspec import Meta

from shoal.api.handling import aside, handles
from shoal.api.jobs import NUMBER_MAX, Index, WaitS
from shoal.api.log_find import Hit, Search, Source, find, matching
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.calls.jobs import JobCalls
from shoal.calls.page import PageCalls
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.core.state.apply_array import parts_of
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.views import LogHits, LogPart, LogPiece, LogPlace, LogView

TOGETHER_MAX = 64  # members that are read at once
AWAY_WAIT_S = 5.0  # for output of a neighbor, which does not say when the job comes back

Text = Annotated[str, Meta(max_length=256)]
Member = Annotated[int, Meta(ge=0, le=NUMBER_MAX)] | None
Places = Annotated[str, Meta(max_length=2_000, pattern=r"^(\d{1,15}(,\d{1,15})*)?(?!\n)$")]
Line = Annotated[str, Meta(max_length=32, pattern=r"^(\d{1,9}:\d{1,15})?(?!\n)$")]
Share = Annotated[float, Meta(ge=0, le=1)] | None


class Logs:
    @handles(JobCalls.logs)
    async def logs(
        self,
        reach: Reach,
        job_id: str,
        member: Index = 0,
        attempt: Index = 0,
        offset: Annotated[int, Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)] = 0,
        wait_s: WaitS = 0,
        grep: Annotated[str, Meta(max_length=256)] = "",
        since_ms: Index = 0,
    ) -> LogView:
        loop, job = reach.loop, _job(reach, job_id, member, attempt)
        if since_ms:
            offset = loop.logs.offset_at(
                MemberRef(job.id, attempt or job.attempt, member), since_ms
            )
        search = grep.encode()
        if job.away is not None:
            await _news(reach, job, member, 0)
        view = await _search(reach, job, attempt or job.attempt, member, offset, search)
        deadline_s = time.monotonic() + wait_s
        while not view.data and not view.ended and (left_s := deadline_s - time.monotonic()) > 0:
            await _news(reach, job, member, left_s)
            job = reach.job(job_id)
            offset = max(offset, view.next_offset) if search else offset
            view = await _search(reach, job, attempt or job.attempt, member, offset, search)
        return view

    @handles(PageCalls.log_part)
    async def part(
        self,
        reach: Reach,
        job_id: str,
        member: Member = None,
        attempt: Index = 0,
        places: Places = "",
        back: bool = False,
        share: Share = None,
        since_ms: Index = 0,
        line: Line = "",
        grep: Text = "",
        wait_s: WaitS = 0,
    ) -> LogPart:
        job = _job(reach, job_id, member or 0, attempt)
        if job.away is not None:
            await _news(reach, job, member, 0)
        offsets = [int(place) for place in places.split(",")] if places else []
        want = _Want(offsets, back, share, since_ms, line, grep.encode())
        attempt = attempt or job.attempt
        deadline_s = time.monotonic() + wait_s
        while True:
            refs = _refs(job, attempt, member)[:TOGETHER_MAX]
            if offsets and len(offsets) != len(refs):
                raise Refusal(422, f"has {len(offsets)} numbers for {len(refs)} members", "places")
            view = await _part(reach.loop.logs, refs, attempt, want)
            await reach.loop.settled()
            left_s = deadline_s - time.monotonic()
            if view.pieces or view.ended or back or left_s <= 0:
                return view
            if view.ends == want.places:  # otherwise a search has more to read
                await _news(reach, job, member, left_s)
            want = want._replace(places=view.ends)
            job = reach.job(job_id)

    @handles(PageCalls.log_find)
    async def find(
        self,
        reach: Reach,
        job_id: str,
        member: Member = None,
        attempt: Index = 0,
        text: Text = "",
        from_member: Index = 0,
        from_offset: Index = 0,
    ) -> LogHits:
        job = _job(reach, job_id, member or 0, attempt)
        attempt = attempt or job.attempt
        refs, logs = _refs(job, attempt, member), reach.loop.logs
        at = next((at for at, (ref, _) in enumerate(refs) if ref.member >= from_member), len(refs))
        found = await aside(lambda: find(logs, refs, text.encode(), at, from_offset))
        await reach.loop.settled()
        more = found.at < len(refs)
        rest = LogPlace(member=refs[found.at][0].member, offset=found.offset) if more else None
        return LogHits(attempt=attempt, hits=found.hits, rest=rest)


async def _news(reach: Reach, job: Job, member: int | None, wait_s: float) -> None:
    """Returns when there may be more to show. What a neighbor runs prints there."""
    loop = reach.loop
    if job.away is None or loop.neighboring is None:
        await loop.changed(job.id, wait_s)
        return
    await loop.neighboring.bring_output(job, member or 0, min(wait_s, AWAY_WAIT_S))
    await loop.settled()


class _Want(NamedTuple):
    places: list[int]
    back: bool
    share: float | None
    since_ms: int
    line: str
    grep: bytes

    def begin(self, shown: Together) -> list[int]:
        if self.places:
            return [min(at, size) for at, size in zip(self.places, shown.sizes, strict=True)]
        if self.line:
            member, _, offset = self.line.partition(":")
            return shown.at_line(int(member), int(offset))
        if self.since_ms:
            return shown.at_time(self.since_ms)
        if self.share is not None:
            return shown.at_share(self.share)
        return shown.sizes if self.back else [0] * len(shown.sizes)


Refs = list[tuple[MemberRef, bool]]


async def _part(logs: LogStore, refs: Refs, attempt: int, want: _Want) -> LogPart:
    def read() -> LogPart:
        with closing(Together(logs, refs)) as shown:
            begin = want.begin(shown)
            if want.grep:
                part = shown.matching(begin, Search(want.grep), back=want.back)
            else:
                part = shown.backward(begin) if want.back else shown.forward(begin)
            first_ms, last_ms = shown.span_ms()
            over = all(over for _, over in refs)
            return LogPart(
                attempt=attempt,
                members=[ref.member for ref, _ in refs],
                sizes=shown.sizes,
                starts=part.starts,
                ends=part.ends,
                ended=over and part.ends == shown.sizes,
                first_ms=first_ms,
                last_ms=last_ms,
                pieces=part.pieces,
            )

    return await aside(read)


def _refs(job: Job, attempt: int, member: int | None) -> Refs:
    """Whose output it is, and whether more can come: looked at before it is read."""
    count = max(job.spec.members, job.spec.members_max)
    numbers = range(count) if member is None else (member,)
    return [(MemberRef(job.id, attempt, at), _over(job, attempt, at)) for at in numbers]


def _job(reach: Reach, job_id: str, member: int, attempt: int) -> Job:
    job = reach.job(job_id)
    if job.elements is not None:
        first = f"{job.id}.{parts_of(job)[0].index_at(0)}"
        raise Refusal(422, f"{job.id} is an array; name an element, e.g. {first}", "job")
    last = max(job.spec.members, job.spec.members_max) - 1
    if member > last:
        raise Refusal(422, f"{job.id} has members 0 to {last}", "member")
    if attempt > job.attempt:
        raise Refusal(422, f"{job.id} has had {job.attempt} attempts", "attempt")
    return job


def _over(job: Job, attempt: int, member: int) -> bool:
    """Whether no more output can come. An elastic gang may have shrunk below this member."""
    return (
        job.phase is Phase.FINISHED
        or attempt < job.attempt
        or (job.phase is Phase.WAITING and attempt > 0)
        or (bool(job.members) and (member >= len(job.members) or job.members[member].over))
    )


async def _search(
    reach: Reach, job: Job, attempt: int, member: int, offset: int, search: bytes
) -> LogView:
    """A search may read many megabytes, so it is done in a thread."""
    loop = reach.loop
    if not search:
        return _log(loop, job, attempt, member, offset, search)
    view = await aside(lambda: _log(loop, job, attempt, member, offset, search))
    await loop.settled()
    return view


def _log(
    loop: ControlLoop, job: Job, attempt: int, member: int, offset: int, search: bytes
) -> LogView:
    # Look whether more can come before reading, so that nothing is missed in between.
    over = _over(job, attempt, member)
    ref = MemberRef(job.id, attempt, member)
    if search and offset >= 0:
        read = matching(loop.logs, ref, offset, search, over=over)
    else:
        read = loop.logs.read(ref, offset)
    return LogView(
        attempt=attempt,
        member=member,
        offset=read.start,
        next_offset=read.next,
        ended=over and read.next >= read.size,
        data=read.data,
    )


# Parts of the output of one member or of several, forward or backward from any place.
#
# What several members wrote is put in the order in which it came, as far as that is known: a second
# near the beginning of an attempt, a few seconds after hours (`control/logs.py`). What came at the
# same time is in the order of the members' numbers, and what has no known time comes first. The
# lines of one member never change their order. Nothing here reads more than a part of a file.


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
