"""The API of a job's output: one member's as it is, or any part of several members' in order."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Annotated, NamedTuple

from litestar import Controller
from litestar.params import Parameter

from shoal.api.handling import handles
from shoal.api.jobs import NUMBER_MAX, Index, WaitS
from shoal.api.log_find import Search, find
from shoal.api.log_parts import Together
from shoal.api.log_search import matching
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.api.read_threads import aside
from shoal.calls.jobs import JobCalls
from shoal.calls.page import PageCalls
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.core.state.apply_array import parts_of
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.views import LogHits, LogPart, LogPlace, LogView

TOGETHER_MAX = 64  # members that are read at once

Text = Annotated[str, Parameter(max_length=256)]
Member = Annotated[int | None, Parameter(ge=0, le=NUMBER_MAX)]
Places = Annotated[str, Parameter(max_length=2_000, pattern=r"^(\d{1,15}(,\d{1,15})*)?(?!\n)$")]
Line = Annotated[str, Parameter(max_length=32, pattern=r"^(\d{1,9}:\d{1,15})?(?!\n)$")]
Share = Annotated[float | None, Parameter(ge=0, le=1)]


class Logs(Controller):
    @handles(JobCalls.logs)
    async def logs(
        self,
        reach: Reach,
        job_id: str,
        member: Index = 0,
        attempt: Index = 0,
        offset: Annotated[int, Parameter(ge=-NUMBER_MAX, le=NUMBER_MAX)] = 0,
        wait_s: WaitS = 0,
        grep: Annotated[str, Parameter(max_length=256)] = "",
        since_ms: Index = 0,
    ) -> LogView:
        loop, job = reach.loop, _job(reach, job_id, member, attempt)
        if since_ms:
            offset = loop.logs.offset_at(
                MemberRef(job.id, attempt or job.attempt, member), since_ms
            )
        search = grep.encode()
        view = await _search(reach, job, attempt or job.attempt, member, offset, search)
        deadline_s = time.monotonic() + wait_s
        while not view.data and not view.ended and (left_s := deadline_s - time.monotonic()) > 0:
            await reach.loop.changed(job_id, left_s)
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
                await reach.loop.changed(job_id, left_s)
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
