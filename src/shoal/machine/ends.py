"""The file in which a machine's own scripts say until when its node lives: `ends.json`.

A Slurm batch script, a pod's preStop hook or a cloud's spot notice writes it (`shoal ends`), and
the node's agent reads it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import msgspec

from shoal.machine.files import read_own, write_private
from shoal.model.node import ENDS_WHY_MAX

log = logging.getLogger("shoal.agent")

ENDS = "ends.json"
YEAR_S = 366 * 24 * 3600


class EndNote(msgspec.Struct, frozen=True):
    """`at`: seconds since the epoch, by this machine's clock."""

    at: float
    why: str = ""


def write_end(folder: Path, at_s: float, why: str) -> None:
    write_private(folder / ENDS, msgspec.json.encode(EndNote(at_s, why[:ENDS_WHY_MAX])))


def forget_end(folder: Path) -> None:
    (folder / ENDS).unlink(missing_ok=True)


class EndFile:
    """Read when it changes. From then on, this machine's clock may be set without moving the
    end."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ENDS
        self._mark: tuple[int, int] | None = None
        self._end: tuple[float, str] | None = None  # by the monotonic clock
        self.look()
        if self.left()[0] == 0:  # of an earlier life: this machine is up again, or was not ended
            self._end = None

    def look(self) -> bool:
        """Has it changed?"""
        mark = None
        with contextlib.suppress(OSError):
            info = self._path.stat()
            mark = (info.st_ino, info.st_mtime_ns)
        if mark == self._mark:
            return False
        self._mark = mark
        self._end = None if mark is None else self._read()
        return True

    def left(self) -> tuple[int | None, str]:
        """How many milliseconds are left, and what ends the node then."""
        if self._end is None:
            return None, ""
        at, why = self._end
        return max(0, int((at - time.monotonic()) * 1000)), why

    def _read(self) -> tuple[float, str] | None:
        try:
            note = msgspec.json.decode(read_own(self._path), type=EndNote)
        except (OSError, msgspec.MsgspecError) as error:
            log.error("%s is ignored: %s", self._path, error)
            return None
        left_s = note.at - time.time()
        if left_s > YEAR_S:
            log.error("%s is ignored: %s is more than a year from now", self._path, note.at)
            return None
        return time.monotonic() + left_s, note.why[:ENDS_WHY_MAX]
