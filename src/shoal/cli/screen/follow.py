"""Following jobs: their output over all attempts, of one or of many, and a line that shows how far
one is."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TextIO

from shoal.cli.cluster import Retry
from shoal.cli.screen import show
from shoal.cli.screen.output import JsonOutput, Output, TextOutput
from shoal.cli.screen.show import at_terminal, note
from shoal.client import ShoalError, Unreachable
from shoal.forms.failure import REFUSED, Failure
from shoal.forms.units import duration_text
from shoal.model.columns import elements_text, progress_text
from shoal.model.job import Outcome
from shoal.model.phrases import printable
from shoal.model.resources import plural
from shoal.model.views import JobRow, JobView, LogView

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


# One line at the bottom of a terminal that shows how far a job is.
#
# It is on stderr, below the job's output. It is erased before anything else is written, and drawn
# again only where a line begins. Pipes and files never get it.


# A shorter job needs no line.
PATIENCE_S = 2.0
STATUS_LOOK_S = 1.0
BAR_WIDTH = 20


class StatusLine:
    """Safe for several threads: a writer erases the line first, and blocks it meanwhile."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._lock = threading.RLock()
        self._text = ""
        self._drawn = False
        self._free = True  # the cursor is at the start of a line

    def __enter__(self) -> StatusLine:
        show.before_note = self.erase
        return self

    def __exit__(self, *_: object) -> None:
        show.before_note = None
        with self._lock:
            self.erase()
            self._text = ""

    def set(self, text: str) -> None:
        with self._lock:
            self._text = text
            self.draw()

    def erase(self) -> None:
        with self._lock:
            if self._drawn:
                self._out.write("\r\x1b[K")
                self._out.flush()
                self._drawn = False

    def draw(self) -> None:
        with self._lock:
            if self._free and self._text:
                columns = shutil.get_terminal_size().columns
                text = printable(self._text)
                text = text if len(text) < columns else text[: max(1, columns - 4)] + "..."
                self._out.write(f"\r\x1b[K\x1b[2m{text}\x1b[0m\r")
                self._out.flush()
                self._drawn = True

    def written(self, write: Callable[[], None], at_line_start: bool) -> None:
        with self._lock:
            self.erase()
            write()
            self._free = at_line_start
            self.draw()


class OutputAbove:
    """Writes a job's output above the line."""

    def __init__(self, out: Output, line: StatusLine, prefixed: bool) -> None:
        self._out = out
        self._line = line
        self._prefixed = prefixed  # then only whole lines are written

    def write(self, attempt: int, member: int, data: bytes) -> None:
        whole = self._prefixed or data.endswith(b"\n")
        # A line that the job itself redraws, such as a progress bar, stays.
        self._line.written(lambda: self._out.write(attempt, member, data), whole)

    def end(self) -> None:
        self._line.written(self._out.end, True)


class StatusUpdater:
    """Asks for the job once a second, in a thread of its own."""

    def __init__(self, line: StatusLine, look: Callable[[], JobView]) -> None:
        self._line = line
        self._look = look
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> StatusUpdater:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        wait_s = PATIENCE_S
        while not self._stop.wait(wait_s):
            wait_s = STATUS_LOOK_S
            try:
                view = self._look()
            except (ShoalError, Unreachable):
                self._line.set("the controller does not answer; retrying")
                continue
            if not self._stop.is_set():
                self._line.set(line_text(view, int(time.time() * 1000)))


def line_text(view: JobView, now_ms: int) -> str:
    """'j7 ■■■■□□□□ 42 %  step 420/1000, loss 1.9, 4m 0s left, 3m 12s'"""
    if view.state in OUTCOMES:
        return ""
    if view.array is not None:
        done = show.bar(view.array.ended, view.array.elements, BAR_WIDTH)
        return f"{view.id} {done} {elements_text(view.array)}"
    running = view.state in ("running", "away") and view.running_ms is not None
    since_ms = view.running_ms if running and view.running_ms is not None else view.submitted_ms
    elapsed = duration_text(max(0, now_ms - since_ms))
    progress = view.progress
    if view.nap is not None:
        elapsed = duration_text(max(0, now_ms - view.nap.since_ms))
    if not running or progress is None:
        return f"{view.id} {view.state} {elapsed}"
    text = f"{progress_text(progress)}; {elapsed} so far"
    if progress.steps_total:
        share = min(1.0, progress.step / progress.steps_total)
        bar = show.bar(progress.step, progress.steps_total, BAR_WIDTH)
        return f"{view.id} {bar} {share:.0%}  {text}"
    return f"{view.id} {text}"


def has_status_line() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


# The output of several jobs and members at once: each line says whose it is.


JOBS_MAX = 200
LOOK_S = 2.0  # between looks for new attempts, ends, and new jobs that match
PAUSE_S = 0.3


class Chosen(NamedTuple):
    """Which parts of the output are wanted."""

    member: int | None = None
    attempt: int | None = None
    tail: int | None = None
    grep: str = ""
    since_ms: int = 0
    alone: bool = False  # of one job, which need not be named in each line


def print_all(retry: Retry, jobs: list[JobView], chosen: Chosen, *, json: bool) -> None:
    """Everything that was written so far, one job after the other."""
    for view in jobs:
        attempt = chosen.attempt or view.attempt
        if not attempt:
            note(f"{view.id} has not started: {view.why}")
            continue
        out = _output(view, chosen, json=json)
        _reader(retry, view, attempt, chosen, out).read_in_turn()
        out.end()


def follow_all(
    retry: Retry, look: Callable[[], list[JobRow]], chosen: Chosen, *, json: bool, go_on: bool
) -> None:
    """Until all of them have ended; with `go_on`, jobs that match later are followed, too."""
    following: dict[str, _Followed] = {}
    looked_s, over = 0.0, False
    while not over:
        if time.monotonic() - looked_s >= LOOK_S:
            looked_s = time.monotonic()
            for row in look() if go_on or not following else ():
                if row.id not in following and len(following) < JOBS_MAX:
                    following[row.id] = _Followed(retry, row.id, chosen, json)
            for one in following.values():
                one.look()
            over = all(one.over for one in following.values()) and not go_on
        came = [one.read() for one in following.values()]
        if not any(came) and not over:
            time.sleep(PAUSE_S)


def download(retry: Retry, jobs: list[JobView], chosen: Chosen, to: Path) -> list[Path]:
    """A file for each member, or one file if there is one member."""
    sources = [
        (view, member)
        for view in jobs
        for member in pick_members(chosen.member, max(view.members, view.members_max))
        if chosen.attempt or view.attempt
    ]
    if not sources:
        raise Failure("--output: none of these jobs has started", REFUSED)
    folder = to.is_dir() or len(sources) > 1 or str(to).endswith("/")
    written = []
    try:
        if folder:
            to.mkdir(parents=True, exist_ok=True)
        for view, member in sources:
            path = to / f"{view.id}.{member}.log" if folder else to
            with path.open("wb") as file:
                out = TextOutput(prefixed=False, terminal=False, out=file)
                one = chosen._replace(member=member)
                attempt = chosen.attempt or view.attempt
                _reader(retry, view, attempt, one, out).read_in_turn()
                out.end()
            written.append(path)
    except OSError as error:
        raise Failure(f"--output: cannot write {to}: {error.strerror}", REFUSED) from None
    return written


class _Followed:
    """One job: its newest attempt, and its output so far."""

    def __init__(self, retry: Retry, job: str, chosen: Chosen, json: bool) -> None:
        self._retry, self._job, self._chosen, self._json = retry, job, chosen, json
        self._reader: Reader | None = None
        self._out: Output | None = None
        self._ended = False

    @property
    def over(self) -> bool:
        return self._ended and (self._reader is None or not self._reader.open)

    def look(self) -> None:
        if self._ended or (self._reader is not None and self._reader.open):
            return
        view = self._retry(lambda client: client.job(self._job))
        newer = view.attempt > (self._reader.attempt if self._reader else 0)
        if newer:
            first = self._reader is None
            self._out = _output(view, self._chosen, json=self._json)
            attempt = view.attempt if first else self._reader.attempt + 1  # type: ignore[union-attr]
            chosen = self._chosen if first else self._chosen._replace(tail=None, since_ms=0)
            self._reader = _reader(self._retry, view, attempt, chosen, self._out)
        elif view.state in OUTCOMES:
            self._ended = True
            if self._out is not None:
                self._out.end()

    def read(self) -> bool:
        return self._reader is not None and bool(self._reader.open) and self._reader.read()


def _reader(retry: Retry, view: JobView, attempt: int, chosen: Chosen, out: Output) -> Reader:
    members = pick_members(chosen.member, max(view.members, view.members_max))
    reader = Reader(retry, view.id, attempt, members, out, chosen.grep)
    if chosen.since_ms:
        reader.skip_to(chosen.since_ms)
    elif chosen.tail is not None:
        reader.skip_to_tail(chosen.tail)
    return reader


def _output(view: JobView, chosen: Chosen, *, json: bool) -> Output:
    if json:
        return JsonOutput(view.id)
    several = max(view.members, view.members_max) > 1
    if chosen.alone:
        return TextOutput(prefixed=several and chosen.member is None, terminal=at_terminal())
    return TextOutput(
        prefixed=True,
        terminal=at_terminal(),
        name=(lambda member: f"{view.id}.{member}") if several else (lambda _: view.id),
    )
