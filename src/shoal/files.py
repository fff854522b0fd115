"""Files that must be whole, private, or held by one process at a time."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replace a file whole or not at all; nobody else may read it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)
    temporary.replace(path)


def lock(path: Path) -> int | None:
    """Hold the file for as long as this process or a child that kept the descriptor lives; None
    if another holds it. The kernel lets go when the last holder is gone, however it ended."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + GLANCE_S
    while not _flock(handle, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            os.close(handle)
            return None
        time.sleep(GLANCE_S / 50)
    return handle


def held(path: Path) -> bool:
    """Does a living process hold the lock? Looking takes it for a moment."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _flock(handle, fcntl.LOCK_SH)
    finally:
        os.close(handle)


# Somebody who merely looks whether a lock is held has it for an instant: wait that out.
GLANCE_S = 0.5


def _flock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
