"""One line at the bottom of a terminal that shows how far a job is.

It is on stderr, below the job's output. It is erased before anything else is written, and drawn
again only where a line begins. Pipes and files never get it.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from shoal.cli.screen import show
from shoal.cli.screen.follow import OUTCOMES
from shoal.cli.screen.output import Output
from shoal.cli.screen.words import progress_text, summary
from shoal.client import ShoalError, Unreachable
from shoal.forms.units import duration_text
from shoal.model.phrases import printable
from shoal.model.views import JobView

# A shorter job needs no line.
PATIENCE_S = 2.0
LOOK_S = 1.0
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
            wait_s = LOOK_S
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
        return f"{view.id} {done} {summary(view.array)}"
    running = view.state == "running" and view.running_ms is not None
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


def supported() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
