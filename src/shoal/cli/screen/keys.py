"""Reads single keys from the terminal, without Enter and without echo."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty

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
    b"\x1b[1~": "home",
    b"\x03": "ctrl-c",
}


class Keys:
    """Restores the terminal at the end. If stdin is not a terminal there are no keys."""

    def __init__(self) -> None:
        self._handle = sys.stdin.fileno() if sys.stdin.isatty() else -1
        self._before: list[object] = []

    def __enter__(self) -> Keys:
        if self._handle >= 0:
            self._before = termios.tcgetattr(self._handle)
            tty.setcbreak(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            termios.tcsetattr(self._handle, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> str:
        """The next key, or "" after `seconds`."""
        if self._handle < 0:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._handle], [], [], seconds)
        if not ready:
            return ""
        data = os.read(self._handle, 16)
        if not data:  # the terminal is closed
            return "q"
        return name_of(data)


def name_of(data: bytes) -> str:
    """If several keys arrive at once, the last one."""
    for sequence, name in NAMES.items():
        if data.endswith(sequence):
            return name
    if data.startswith(b"\x1b"):
        return ""
    return data[-1:].decode("ascii", "ignore")
