"""Follows a job: prints its output as it is written, over all attempts, until it ends."""

from __future__ import annotations

import time

from shoal.cli.cluster import Retry
from shoal.cli.screen.output import Output
from shoal.cli.screen.show import note
from shoal.model.job import Outcome
from shoal.model.resources import plural
from shoal.model.views import JobView, LogView

# With one open member the controller waits for output. Several members are asked in turn, with
# this pause.
LONG_WAIT_S = 10.0
TURN_PAUSE_S = 0.2
# After this time the user wants to know why the job does not start.
PATIENCE_BEFORE_START_S = 1.0
TAIL_BYTES_FIRST = 64 * 1024

OUTCOMES = frozenset(outcome.value for outcome in Outcome)


class Reader:
    """Reads one attempt; `open` maps each member that may still write to the offset read so far."""

    def __init__(
        self,
        retry: Retry,
        job: str,
        attempt: int,
        members: list[int],
        out: Output,
        grep: str = "",
    ) -> None:
        self._grep = grep
        self._retry = retry
        self._job = job
        self.attempt = attempt
        self._out = out
        self.open = dict.fromkeys(members, 0)

    def skip_to_tail(self, lines: int) -> None:
        """Begin with the last lines of each member."""
        for member in self.open:
            self.open[member] = self._tail_offset(member, lines)

    def skip_to(self, since_ms: int) -> None:
        """Begin with what was written since then, to within a few seconds."""
        for member in self.open:
            view = self._retry(
                lambda client, member=member: client.logs(  # type: ignore[misc]
                    self._job, member=member, attempt=self.attempt, since_ms=since_ms
                )
            )
            self.open[member] = view.offset

    def read(self, wait_s: float = 0) -> bool:
        """Read each open member once; returns whether there was output. Waits if one is open."""
        came = False
        for member, offset in list(self.open.items()):
            view = self._fetch(member, offset, wait_s if len(self.open) == 1 else 0)
            if view.data:
                self._out.write(self.attempt, member, view.data)
            if view.data or view.next_offset > offset:  # lines that were left out count, too
                self.open[member] = view.next_offset
                came = True
            if view.ended:
                del self.open[member]
        return came

    def read_in_turn(self) -> None:
        """Everything written so far, one member after the other."""
        for member in list(self.open):
            whole = Reader(self._retry, self._job, self.attempt, [member], self._out, self._grep)
            whole.open[member] = self.open[member]
            while whole.read():
                pass

    def _fetch(self, member: int, offset: int, wait_s: float = 0) -> LogView:
        return self._retry(
            lambda client: client.logs(
                self._job,
                member=member,
                attempt=self.attempt,
                offset=offset,
                wait_s=wait_s,
                grep=self._grep if offset >= 0 else "",
            )
        )

    def _tail_offset(self, member: int, lines: int) -> int:
        size = TAIL_BYTES_FIRST
        while True:
            view = self._fetch(member, -size)
            data, begin, end = view.data, view.offset, view.next_offset
            # Not past the first end: the job may write faster than we read.
            while end < view.offset + size and (more := self._fetch(member, end)).data:
                if more.next_offset - more.offset == len(more.data):
                    data += more.data
                else:  # a part that was not kept: what follows is elsewhere
                    data, begin = b"", more.next_offset
                end = more.next_offset
            if begin != view.offset or begin == 0 or data.count(b"\n") > lines:
                return begin + _start_of_last_lines(data, lines)
            size *= 4


def follow(
    retry: Retry,
    job: str,
    members: list[int],
    out: Output,
    *,
    from_attempt: int = 0,
    tail: int | None = None,
) -> JobView:
    """Print until the job ends; returns its final view. `from_attempt` 0: the newest."""
    view = _wait_for_start(retry, job)
    if not view.attempt:
        return view
    reader = Reader(retry, job, from_attempt or view.attempt, members, out)
    if tail is not None:
        reader.skip_to_tail(tail)
    while True:
        _read_attempt(retry, job, reader)
        out.end()
        view = _wait_for_next(retry, job, reader.attempt)
        if view.attempt <= reader.attempt:
            return view
        reader = Reader(retry, job, reader.attempt + 1, members, out)
        where = f" on {', '.join(view.nodes[:6])}" if view.nodes else ""
        note(f"[{job}: attempt {reader.attempt}{where}]")


def follow_attempt(reader: Reader, retry: Retry, job: str, out: Output) -> None:
    """Print until this attempt ends."""
    _read_attempt(retry, job, reader)
    out.end()


def _read_attempt(retry: Retry, job: str, reader: Reader) -> None:
    while reader.open:
        if not reader.read(wait_s=LONG_WAIT_S) and len(reader.open) > 1:
            _look(retry, job, "finished", TURN_PAUSE_S)


def _wait_for_start(retry: Retry, job: str) -> JobView:
    """Wait until there is an attempt to read, or the job ended without one."""
    begun, noted = time.monotonic(), False
    while True:
        view = _look(retry, job, "running", PATIENCE_BEFORE_START_S)
        if view.attempt or view.state in OUTCOMES:
            return view
        if not noted and time.monotonic() - begun >= PATIENCE_BEFORE_START_S:
            note(f"[{job} is waiting: {view.why}]")
            noted = True


def _wait_for_next(retry: Retry, job: str, attempt: int) -> JobView:
    """Wait until there is a newer attempt, or the job ends."""
    noted = False
    while True:
        view = _look(retry, job, "finished", TURN_PAUSE_S)
        if view.state in OUTCOMES or view.attempt > attempt:
            return view
        if view.state == "waiting" and not noted:
            note(f"[{job}: attempt {attempt} ended; {view.why}]")
            noted = True


def _look(retry: Retry, job: str, wait_for: str, wait_s: float) -> JobView:
    return retry(lambda client: client.job(job, wait_for=wait_for, wait_s=wait_s))


def _start_of_last_lines(data: bytes, lines: int) -> int:
    """Where the last lines begin; a newline at the very end does not begin a line."""
    end = len(data) - data.endswith(b"\n")
    for _ in range(lines):
        newline = data.rfind(b"\n", 0, end)
        if newline < 0:
            return 0
        end = newline
    return end + 1 if lines else len(data)


def pick_members(asked: int | None, count: int) -> list[int]:
    """All members, or the given one."""
    if asked is None:
        return list(range(count))
    if not 0 <= asked < count:
        from shoal.forms.failure import Failure

        raise Failure(f"--member: there are {plural(count, 'member')}, 0 to {count - 1}")
    return [asked]


def wait_for_end(retry: Retry, job: str) -> JobView:
    while (view := _look(retry, job, "finished", LONG_WAIT_S)).state not in OUTCOMES:
        pass
    return view
