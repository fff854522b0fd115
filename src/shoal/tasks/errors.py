"""Errors of tasks, and how they travel from a worker to its client."""

from __future__ import annotations

import pickle
import traceback
from concurrent.futures import BrokenExecutor


class TaskFailed(Exception):
    """A task that was given up: its index, the number of tries, and the last error."""

    def __init__(self, index: int, tries: int, error: BaseException, traceback: str) -> None:
        super().__init__(index, tries, error, traceback)
        self.index = index
        self.tries = tries
        self.error = error
        self.traceback = traceback

    def __str__(self) -> str:
        times = "once" if self.tries == 1 else f"{self.tries} times"
        return f"task {self.index} failed {times}; last error:\n{self.traceback}"


class WorkerDied(BrokenExecutor):
    """The process that ran a task ended before the task did."""


class InitFailed(BrokenExecutor):
    """Workers cannot start: `init` failed, or Python itself did not start."""


class Unloadable(Exception):
    """A worker cannot load the function."""


class RemoteError(Exception):
    """Stands in for an exception that cannot be sent from one process to another."""


class RemoteTraceback(Exception):
    """The cause of an exception that was raised in a worker: its traceback there, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def portable(error: BaseException) -> tuple[bytes, str]:
    """An exception as bytes that load again, and its traceback as text."""
    # The first frame is the worker's own loop, which does not help a user.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:
        data = pickle.dumps(error, pickle.HIGHEST_PROTOCOL)
        pickle.loads(data)  # many exceptions with their own __init__ do not survive this
    except Exception:
        data = _dump_by_value(error)
    return data, text


def _dump_by_value(error: BaseException) -> bytes:
    try:
        import cloudpickle

        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:
        return pickle.dumps(RemoteError(f"{type(error).__name__}: {_said(error)}"))


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(cannot be printed)"


def restored(data: bytes, text: str) -> BaseException:
    try:
        error: BaseException = pickle.loads(data)
    except Exception:
        lines = text.strip().splitlines()
        error = RemoteError(lines[-1] if lines else "unknown")
    error.__cause__ = RemoteTraceback(text)
    return error
