"""Is it the member's own fault that it could not start or failed, or this node's?"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from shoal.machine.paths import Hangs
from shoal.model.job import Fault

# Errors that no job causes by its request: the machine has run out of disk space, memory,
# processes or descriptors, or its disk fails.
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
ENTRIES_MAX = 10_000  # of a member's files, which the agent looks at in one turn


class CannotStart(Exception):
    """A reason that a user can act on."""

    def __init__(self, why: str, fault: Fault = Fault.NONE) -> None:
        super().__init__(why)
        self.fault = fault


def fault_of(error: BaseException) -> Fault:
    """From the exception itself, or from the system error that caused it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CannotStart) and seen.fault:
            return seen.fault
        if isinstance(seen, Hangs):
            return Fault.HANGS
        if isinstance(seen, OSError) and seen.errno in OF_THE_NODE:
            return Fault.START
        seen = seen.__cause__ or seen.__context__
    return Fault.NONE


def must_have_room(directory: str) -> None:
    """A member that could not write a line, or make a file, would fail, and might not be run again.
    That its own folder could be had says nothing: it may have been made for another member."""
    stats = os.statvfs(directory)
    full = stats.f_blocks and stats.f_bavail * stats.f_frsize < ROOM_BYTES_MIN
    # Some file systems say that they have no inodes left, and make one when it is needed.
    if full or (stats.f_files and not stats.f_favail and disk_problem(Path(directory))):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), directory)


def disk_problem(directory: Path) -> str:
    """Why files cannot be written here, in words; empty if they can."""
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


def fills_disk(directory: Path) -> bool:
    """Does it hold more than half of its disk? Then a member that found the disk full has filled
    it: its files are removed with it, and it would do the same on the next node."""
    stats = os.statvfs(directory)
    left, looked, folders = stats.f_blocks * stats.f_frsize // 2, 0, [str(directory)]
    while folders:
        # Not by recursion: how deep its folders are is the member's choice.
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                looked += 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                left -= entry.stat(follow_symlinks=False).st_blocks * 512
                if left < 0 or looked > ENTRIES_MAX:
                    return left < 0
    return False
