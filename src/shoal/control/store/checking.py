"""Looks at the whole file of a store after a start, beside everything else.

A start reads only what the state needs. Damage elsewhere (old events, records, an index) would show
when somebody asks for it, perhaps after the last good backup is gone.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from pathlib import Path
from urllib.parse import quote

from shoal.control.alarms import Alarms

log = logging.getLogger("shoal.control")

CHECK_S_MAX = 60.0  # about 10 GB from a fast disk
PAUSE_S = 0.01  # after each look at the clock, so that a slow disk has time for commits
OPCODES = 50_000


def begin_check(path: Path, alarms: Alarms) -> threading.Thread:
    """In a thread of its own, with a bound on its time. Damage is an alarm: jobs go on."""
    thread = threading.Thread(target=_check, args=(path, alarms), name="check", daemon=True)
    thread.start()
    return thread


def _check(path: Path, alarms: Alarms) -> None:
    found = check(path)
    if found:
        log.error("%s: %s", path, found)
        text = f"{path} is damaged where nothing needs it yet ({found}); make it whole with: "
        alarms.raise_("store check", f"{text}shoal down, shoal salvage, shoal up")


def check(path: Path, seconds_max: float = CHECK_S_MAX) -> str:
    """What is wrong with the file, in one line; empty: nothing, or the time was too short."""
    deadline = time.monotonic() + seconds_max

    def look() -> int:
        time.sleep(PAUSE_S)
        return int(time.monotonic() > deadline)

    try:
        address = f"file:{quote(str(path))}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as source:
            source.set_progress_handler(look, OPCODES)
            (found,) = source.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        damaged = "malformed" in str(error) or "not a database" in str(error)
        return str(error) if damaged else ""
    return "" if found == "ok" else " ".join(str(found).split())
