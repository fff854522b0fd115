"""Following a job: its output as it is written, attempt after attempt, to the end."""

from __future__ import annotations

import time
from typing import Protocol

from shoal.cli.reach import Steady
from shoal.cli.screen.show import note
from shoal.model.job import Outcome
from shoal.model.resources import plural
from shoal.model.views import JobView, LogView

# One open member is waited for by the controller; of several each is asked in turn, so often.
LONG_WAIT_S = 10.0
TURN_PAUSE_S = 0.2
# Who waits longer than this for a start wants to know what for.
PATIENCE_BEFORE_START_S = 1.0
TAIL_BYTES_FIRST = 64 * 1024

OUTCOMES = frozenset(outcome.value for outcome in Outcome)


class Output(Protocol):
    def write(self, attempt: int, member: int, data: bytes) -> None: ...

    def end(self) -> None:
        """An attempt is over: let go of what is held back."""


class Reader:
    """Reads one attempt; `open` maps the members that may still write to how far they are read."""

    def __init__(self, steady: Steady, job: str, attempt: int, members: list[int], out: Output):
        self._steady = steady
        self._job = job
        self.attempt = attempt
        self._out = out
        self.open = dict.fromkeys(members, 0)

    def skip_to_tail(self, lines: int) -> None:
        """Begin with the last lines of each member."""
        for member in self.open:
            self.open[member] = self._tail_offset(member, lines)

    def read(self, wait_s: float = 0) -> bool:
        """One turn over all open members; tells if anything came. Waits for one member only."""
        came = False
        for member, offset in list(self.open.items()):
            view = self._fetch(member, offset, wait_s if len(self.open) == 1 else 0)
            if view.data:
                self._out.write(self.attempt, member, view.data)
                self.open[member] = view.next_offset
                came = True
            if view.ended:
                del self.open[member]
        return came

    def read_in_turn(self) -> None:
        """All there is now, one member after the other."""
        for member in list(self.open):
            whole = Reader(self._steady, self._job, self.attempt, [member], self._out)
            whole.open[member] = self.open[member]
            while whole.read():
                pass

    def _fetch(self, member: int, offset: int, wait_s: float = 0) -> LogView:
        return self._steady(
            lambda client: client.logs(
                self._job, member=member, attempt=self.attempt, offset=offset, wait_s=wait_s
            )
        )

    def _tail_offset(self, member: int, lines: int) -> int:
        size = TAIL_BYTES_FIRST
        while True:
            view = self._fetch(member, -size)
            data, begin, end = view.data, view.offset, view.next_offset
            # No further than the end was at first: it may be written faster than we read.
            while end < view.offset + size and (more := self._fetch(member, end)).data:
                if more.next_offset - more.offset == len(more.data):
                    data += more.data
                else:  # a part that is not kept: what follows stands elsewhere
                    data, begin = b"", more.next_offset
                end = more.next_offset
            if begin != view.offset or begin == 0 or data.count(b"\n") > lines:
                return begin + _start_of_last_lines(data, lines)
            size *= 4


def follow(
    steady: Steady,
    job: str,
    members: list[int],
    out: Output,
    *,
    from_attempt: int = 0,
    tail: int | None = None,
) -> JobView:
    """Until the job is over; returns what it came to. `from_attempt` 0: the newest."""
    view = _wait_for_start(steady, job)
    if not view.attempt:
        return view
    reader = Reader(steady, job, from_attempt or view.attempt, members, out)
    if tail is not None:
        reader.skip_to_tail(tail)
    while True:
        _read_attempt(steady, job, reader)
        out.end()
        view = _wait_for_next(steady, job, reader.attempt)
        if view.attempt <= reader.attempt:
            return view
        reader = Reader(steady, job, reader.attempt + 1, members, out)
        where = f" on {', '.join(view.nodes[:6])}" if view.nodes else ""
        note(f"[{job}: attempt {reader.attempt}{where}]")


def follow_attempt(reader: Reader, steady: Steady, job: str, out: Output) -> None:
    """Until this attempt is over, whatever comes after it."""
    _read_attempt(steady, job, reader)
    out.end()


def _read_attempt(steady: Steady, job: str, reader: Reader) -> None:
    while reader.open:
        if not reader.read(wait_s=LONG_WAIT_S) and len(reader.open) > 1:
            _look(steady, job, "finished", TURN_PAUSE_S)


def _wait_for_start(steady: Steady, job: str) -> JobView:
    """Until there is an attempt to read, or there will never be one."""
    begun, told = time.monotonic(), False
    while True:
        view = _look(steady, job, "running", PATIENCE_BEFORE_START_S)
        if view.attempt or view.state in OUTCOMES:
            return view
        if not told and time.monotonic() - begun >= PATIENCE_BEFORE_START_S:
            note(f"[{job} is waiting: {view.why}]")
            told = True


def _wait_for_next(steady: Steady, job: str, attempt: int) -> JobView:
    """Until there is a newer attempt, or the job is over."""
    told = False
    while True:
        view = _look(steady, job, "finished", TURN_PAUSE_S)
        if view.state in OUTCOMES or view.attempt > attempt:
            return view
        if view.state == "waiting" and not told:
            note(f"[{job}: attempt {attempt} is over; {view.why}]")
            told = True


def _look(steady: Steady, job: str, wait_for: str, wait_s: float) -> JobView:
    return steady(lambda client: client.job(job, wait_for=wait_for, wait_s=wait_s))


def _start_of_last_lines(data: bytes, lines: int) -> int:
    """Where the last lines begin; a line end at the very end begins no line."""
    end = len(data) - data.endswith(b"\n")
    for _ in range(lines):
        newline = data.rfind(b"\n", 0, end)
        if newline < 0:
            return 0
        end = newline
    return end + 1 if lines else len(data)


def pick_members(asked: int | None, count: int) -> list[int]:
    """All, or the one that was asked for."""
    if asked is None:
        return list(range(count))
    if not 0 <= asked < count:
        from shoal.forms.failure import Failure

        raise Failure(f"--member: there are {plural(count, 'member')}, 0 to {count - 1}")
    return [asked]


def wait_for_end(steady: Steady, job: str) -> JobView:
    while (view := _look(steady, job, "finished", LONG_WAIT_S)).state not in OUTCOMES:
        pass
    return view
