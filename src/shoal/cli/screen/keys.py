"""Reads single keys from the terminal, without Enter and without echo."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Sequence

NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b[5~": "page-up",
    b"\x1b[6~": "page-down",
    b"\x1b[H": "home",
    b"\x1bOH": "home",
    b"\x1b[1~": "home",
    b"\x1b[F": "end",
    b"\x1bOF": "end",
    b"\x1b[4~": "end",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x15": "ctrl-u",
    b"\x03": "ctrl-c",
    b"\x0c": "ctrl-l",
}
_KEY = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[A-Za-z]|\x1b|[\x00-\x1f\x7f]|[^\x00-\x1f\x7f]+")
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?$")
# The rest of a sequence follows at once, even through ssh; a key that is pressed does not.
SEQUENCE_S = 0.05


class Keys:
    """Restores the terminal at the end. If stdin is not a terminal there are no keys."""

    def __init__(self) -> None:
        self._handle = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else -1
        self._before: list[object] = []
        self._typed: deque[str] = deque()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")

    def __enter__(self) -> Keys:
        if self._handle >= 0:
            self._before = termios.tcgetattr(self._handle)
            tty.setcbreak(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            termios.tcsetattr(self._handle, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Whatever was typed until now."""
        self._typed.clear()
        if self._handle >= 0:
            with contextlib.suppress(termios.error):  # the terminal is closed
                termios.tcflush(self._handle, termios.TCIFLUSH)

    def wait(self, seconds: float, others: Sequence[int] = ()) -> str:
        """The next key; "" after `seconds`, or when one of the `others` can be read."""
        if self._typed:
            return self._typed.popleft()
        if self._handle < 0 and not others:
            time.sleep(seconds)
            return ""
        mine = [self._handle] if self._handle >= 0 else []
        ready, _, _ = select.select([*mine, *others], [], [], max(0.0, seconds))
        if self._handle not in ready:
            return ""
        data = os.read(self._handle, 1024)
        if not data:  # the terminal is closed
            return "ctrl-c"
        while _UNFINISHED.search(data) and select.select(mine, [], [], SEQUENCE_S)[0]:
            data += os.read(self._handle, 16)
        self._typed.extend(names_of(data, self._decoder))
        return self._typed.popleft() if self._typed else ""


def names_of(data: bytes, decoder: codecs.IncrementalDecoder | None = None) -> list[str]:
    """The keys in what a terminal sent; those that mean nothing here are left out."""
    decoder = decoder or codecs.getincrementaldecoder("utf-8")(errors="ignore")
    found = []
    for match in _KEY.finditer(data):
        if match[0] in NAMES:
            found.append(NAMES[match[0]])
        elif match[0][0] >= 0x20 and match[0] != b"\x7f":
            found.extend(one for one in decoder.decode(match[0]) if one.isprintable())
    return found
