"""Errors of a run, each in one line that its user can act on."""

from __future__ import annotations

import sys
from types import TracebackType


class TrainError(Exception):
    """Ends the process with code 1 and its message as the last line, without a traceback."""

    one_line = True


class Unsaved(TrainError):
    """A save that failed. It may work later, and the run can go on without it."""


def say(text: str) -> None:
    """A line for the job's log."""
    print(f"shoal.train: {text}", file=sys.stderr, flush=True)


def end_in_one_line() -> None:
    """From now on an uncaught error that says all in its message prints one line, as those of
    `shoal.data` do; other exceptions are unchanged."""
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if getattr(error, "one_line", False):
            say(str(error))
        else:
            before(kind, error, traceback)

    sys.excepthook = hook
