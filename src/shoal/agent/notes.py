"""Lines about members in the agent's log. There may be hundreds of them a second, so they do not go
through `logging`, where each takes as long as the start of a small program."""

from __future__ import annotations

import contextlib
import os
import sys
import time

_second = 0
_stamp = ""


def note(text: str) -> None:
    """In the form of all other lines (startup.py)."""
    global _second, _stamp
    now_ms = time.time_ns() // 1_000_000
    second, part_ms = divmod(now_ms, 1000)
    if second != _second:
        _second, _stamp = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
    with contextlib.suppress(OSError):  # a full disk keeps no member from starting
        os.write(sys.stderr.fileno(), f"{_stamp},{part_ms:03d} {text}\n".encode())
