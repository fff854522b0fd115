"""Files that must be whole, private, or held by one process at a time."""

from __future__ import annotations

import fcntl
import os
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
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def held(path: Path) -> bool:
    """Does a living process hold the lock?"""
    if not path.exists():
        return False
    handle = lock(path)
    if handle is None:
        return True
    os.close(handle)
    return False
