"""The output of several jobs and members at once: each line says whose it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shoal.cli.cluster import Retry
from shoal.cli.screen.follow import OUTCOMES, Reader, pick_members
from shoal.cli.screen.output import JsonOutput, Output, TextOutput
from shoal.cli.screen.show import at_terminal, note
from shoal.forms.failure import REFUSED, Failure
from shoal.model.views import JobRow, JobView

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
