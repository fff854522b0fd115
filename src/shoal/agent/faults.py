"""Whose fault it is that a member could not start or failed: its own, or that of this node."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shoal.model.job import Fault

# What no job brings about by what it asks for: the machine has no room, no memory, no processes or
# no descriptors left, or its disk fails.
OF_THE_NODE = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EROFS,
        errno.EIO,
        errno.EAGAIN,
    )
)
# With less, a job that prints a line fails.
ROOM_BYTES_MIN = 64 * 1024


class CannotStart(Exception):
    """A reason that a user can act on."""

    def __init__(self, why: str, fault: Fault = Fault.NONE) -> None:
        super().__init__(why)
        self.fault = fault


def fault_of(error: BaseException) -> Fault:
    """By what was said, or by the error of the machine that it was said for."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CannotStart) and seen.fault:
            return seen.fault
        if isinstance(seen, OSError) and seen.errno in OF_THE_NODE:
            return Fault.START
        seen = seen.__cause__ or seen.__context__
    return Fault.NONE


def must_have_room(directory: Path) -> None:
    """A member that could not write a line would fail, and might not be run again."""
    stats = os.statvfs(directory)
    if stats.f_blocks and stats.f_bavail * stats.f_frsize < ROOM_BYTES_MIN:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def disk_problem(directory: Path) -> str:
    """What keeps files from being written here, in words; empty if nothing does."""
    probe = directory / ".writable"
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            left = ROOM_BYTES_MIN
            while left:
                left -= os.write(handle, bytes(left))
        finally:
            os.close(handle)
            probe.unlink()
    except OSError as error:
        return (error.strerror or str(error)) if error.errno in OF_THE_NODE else ""
    return ""
