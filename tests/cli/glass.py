"""A program in a terminal: what its screen shows, as far as our own programs need a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.waiting import WAIT_S

SOURCE = Path(__file__).parents[2] / "src"
SHOAL = ("-m", "shoal.main")
_PIECE = re.compile(r"\x1b\[([0-?]*)([ -/]*[@-~])|\x1b[ -/]*[0-~]|[\x00-\x1f]|[^\x00-\x1f\x1b]+")


class Glass:
    """The characters on the screen. It knows what `paint.py` sends, and colors are skipped."""

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self.other = False  # the alternate screen is shown
        self._rest = ""
        self.clear()

    def clear(self) -> None:
        self.rows = [""] * self.lines
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        cut = re.search(r"\x1b(?:\[[0-?]*[ -/]*)?$", text)
        if cut:
            text, self._rest = text[: cut.start()], text[cut.start() :]
        for match in _PIECE.finditer(text):
            if match[2]:
                self._sequence(match[1], match[2])
            elif match[0] == "\n":
                self.row = min(self.row + 1, self.lines - 1)
            elif match[0] == "\r":
                self.column = 0
            elif match[0] >= " ":
                self._put(match[0])

    def _sequence(self, given: str, kind: str) -> None:
        if kind == "H":
            row, _, column = (given or "1;1").partition(";")
            self.row, self.column = int(row) - 1, int(column or 1) - 1
        elif kind == "J":
            self.rows = [""] * self.lines
        elif kind == "K":
            self.rows[self.row] = self.rows[self.row][: self.column]
        elif given == "?1049":
            self.other = kind == "h"
            self.clear()

    def _put(self, text: str) -> None:
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + text + row[self.column + len(text) :]
        self.column += len(text)

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows)


class Terminal:
    def __init__(
        self,
        home: Path,
        *args: str,
        columns: int = 80,
        lines: int = 24,
        program: tuple[str, ...] = SHOAL,
        **env: str,
    ) -> None:
        self._parent, child = pty.openpty()
        self._child = child
        self.glass = Glass(columns, lines)
        self._size(columns, lines)
        self.before = termios.tcgetattr(child)
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        kept |= {"TERM": "xterm-256color", "PYTHONPATH": str(SOURCE), "SHOAL_HOME": str(home)}
        self.process = subprocess.Popen(
            [sys.executable, *program, *args],
            stdin=child,
            stdout=child,
            stderr=child,
            env={**kept, **env},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.raw = ""

    def _size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, columns: int, lines: int) -> None:
        self.glass = Glass(columns, lines)
        self._size(columns, lines)

    def press(self, keys: str) -> None:
        os.write(self._parent, keys.encode())

    def until(self, *wanted: str | Callable[[str], object], gone: str = "") -> str:
        """The screen, when it shows all of these and not what is gone."""
        deadline = time.monotonic() + WAIT_S
        while True:
            text = self.glass.text
            there = all(one in text if isinstance(one, str) else one(text) for one in wanted)
            if there and (not gone or gone not in text):
                return text
            left = deadline - time.monotonic()
            assert left > 0 and self.process.poll() is None, f"{wanted} never came:\n{text}"
            self._read(min(left, 0.5))

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._parent], [], [], seconds)
        if not ready:
            return False
        with contextlib.suppress(OSError):
            data = os.read(self._parent, 65536).decode("utf-8", "replace")
            self.raw += data
            self.glass.feed(data)
        return True

    def end(self) -> int:
        code = self.process.wait(timeout=WAIT_S)
        while self._read(0.1):
            pass
        return code

    @property
    def sane(self) -> bool:
        """The terminal is as it was: its modes, its screen, its cursor."""
        same = termios.tcgetattr(self._child) == self.before
        return (
            same
            and not self.glass.other
            and self.raw.rfind("\x1b[?25h") > self.raw.rfind("\x1b[?25l")
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=WAIT_S)
        os.close(self._parent)
        os.close(self._child)


@contextlib.contextmanager
def terminal(
    home: Path,
    *args: str,
    columns: int = 80,
    lines: int = 24,
    program: tuple[str, ...] = SHOAL,
    **env: str,
) -> Iterator[Terminal]:
    one = Terminal(home, *args, columns=columns, lines=lines, program=program, **env)
    try:
        yield one
    finally:
        one.close()
