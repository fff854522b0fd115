"""Watches a training script that does not use `shoal.train`: where the time of its steps goes.

    shoal run -n 2 -- python -m shoal.train.watch train.py     # the script stays as it is
    import shoal.train.watch                                   # or one line at its top

A step ends when the script's first optimizer has stepped. Waiting for data is the time in a
DataLoader's `next`, saving is the time in `torch.save`, and collectives are timed as in
`shoal.train`. Nothing is wrapped in a process that Shoal did not start.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.machinery
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

from shoal.model.progress import BEATS_ENV
from shoal.train.beats import REF_ENV, Beats
from shoal.train.errors import say
from shoal.train.waits import Stalls, StepTimes, clock_ns


class Watcher:
    """One for a process."""

    def __init__(self) -> None:
        from shoal.train import waits

        self._times = StepTimes()
        self._beats, self._stalls = Beats(), Stalls()
        self._data_ns = 0  # since the last step
        self._stepped_ns = 0  # when the last step ended; 0: none has
        self._first: int | None = None  # of several optimizers, the one whose steps count
        waits.watch(self._times)
        self._watch_loaders()
        self._watch_saves()
        self._watch_optimizers()

    def _watch_loaders(self) -> None:
        from torch.utils.data import dataloader

        kind: Any = dataloader._BaseDataLoaderIter
        original = kind.__next__

        @functools.wraps(original)
        def fetch(loader: Any) -> Any:
            began = clock_ns()
            try:
                return original(loader)
            finally:
                self._data_ns += clock_ns() - began

        kind.__next__ = fetch

    def _watch_saves(self) -> None:
        import torch

        original = torch.save

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            with self._times.saving(in_body=self._stepped_ns > 0):
                return original(*args, **kwargs)

        torch.save = save

    def _watch_optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(optimizer: Any, *_: Any) -> None:
            if self._first is None:
                self._first = id(optimizer)
            if id(optimizer) == self._first:
                self._step(clock_ns())

        register_optimizer_step_post_hook(stepped)

    def _step(self, now_ns: int) -> None:
        """The first one only starts the clock: what came before it was not all its time."""
        data_ns, self._data_ns = self._data_ns, 0
        before_ns, self._stepped_ns = self._stepped_ns, now_ns
        if not before_ns:
            return
        self._times.step(data_ns, max(0, now_ns - before_ns - data_ns), 0)
        if now_ns >= self._beats.due_ns:
            steps = self._times.steps
            # `busy`: nobody knows how long such a script evaluates between two steps.
            numbers = self._times.numbers()
            self._beats.send(busy=True, step=steps, stall_us=self._stalls.us, **numbers)


def start() -> Watcher | None:
    """Once in a process, and in one process of a member: its counts are those of the member."""
    name, ref = os.environ.get(BEATS_ENV, ""), os.environ.get(REF_ENV, "")
    if _kept or not name or not ref:
        return None
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError):  # another process of this member reports
        lock.bind(f"\0{name}/{ref}/watch")
        watcher = Watcher()
        _kept.extend((lock, watcher))
        return watcher
    lock.close()
    return None


_kept: list[object] = []


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(
            "shoal: usage: python -m shoal.train.watch SCRIPT [ARGUMENTS]; for a module (-m), "
            "import shoal.train.watch at its top instead"
        )
    script = sys.argv[1]
    if not Path(script).is_file():
        sys.exit(f"shoal: there is no script {script!r}")
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        start()
    except ImportError as error:
        say(f"{script} is not watched: {error}")
    _run(script)


def _run(script: str) -> None:
    """As Python itself does: `runpy` would leave `__file__` relative, so that a script that changes
    its folder would not find its files, and would take `__main__` away when the script has ended
    but its threads and exit handlers have not."""
    path = os.path.abspath(script)  # not resolved: Python keeps links here
    module = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __loader__=loader,
        __package__=None,
        __annotations__={},
        __cached__=None,
    )
    sys.modules["__main__"] = module
    exec(loader.source_to_code(Path(path).read_bytes(), path), module.__dict__)


if __name__ == "__main__":
    main()
else:
    start()
