"""Probe of the disk under the node's directory: room, and bytes written and read per second."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.probes.reading import MB, Reading, mbs, nothing

FILE_BYTES = 32 * 1024 * 1024
BLOCK_BYTES = 4 * 1024 * 1024
PART_S = 1.0  # writing, and reading, each
# With less, checkpoints and logs may fail at any moment.
FREE_BYTES_MIN = 256 * 1024 * 1024


def disk(directory: Path) -> Reading:
    """A file that is written through to the disk, read back from there, and removed."""
    found = nothing()
    try:
        stats = os.statvfs(directory)
        free = stats.f_bavail * stats.f_frsize
        found.figures["disk_free_mb"] = free // MB
        if free < FREE_BYTES_MIN:
            found.faults.append(f"disk: only {free // MB} MB are free for the node's files")
            return found
        with _scratch(directory) as handle:
            written, took_s = _write(handle)
            found.figures["disk_write_mbs"] = mbs(written, took_s)
            found.figures["disk_read_mbs"] = _read(handle, written)
    except OSError as error:
        found.faults.append(f"disk: cannot be used for the node's files: {error.strerror}")
    return found


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[int]:
    """Without a name from the start, so that nothing stays behind whatever happens."""
    handle, name = tempfile.mkstemp(prefix=".probe-", dir=directory)
    try:
        os.unlink(name)
        yield handle
    finally:
        os.close(handle)


def _write(handle: int) -> tuple[int, float]:
    block, written = os.urandom(BLOCK_BYTES), 0  # some disks store zeros for free
    began = time.monotonic()
    while written < FILE_BYTES and time.monotonic() - began < PART_S:
        written += os.write(handle, block)
        os.fdatasync(handle)
    return written, time.monotonic() - began


def _read(handle: int, size: int) -> int:
    """From the disk where the kernel drops its copy; otherwise this is the speed of memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    done, began = 0, time.monotonic()
    while done < size and time.monotonic() - began < PART_S:
        done += len(os.pread(handle, BLOCK_BYTES, done))
    return mbs(done, time.monotonic() - began)
