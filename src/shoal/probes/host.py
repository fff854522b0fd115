"""Probes of CPUs, memory and clock, in plain Python: steady enough to compare nodes of a kind.

A node under load must not look slow because of the load. So work is counted per second of CPU time,
not of wall time, and the available CPU time is a figure of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.probes.reading import MB, Asked, Reading, joined, mbs, nothing, repeated

# Hashing leaves the interpreter's lock alone and uses no instructions that only some builds of a
# library know. A block is small enough for a cache, and so large that threads meet seldom.
BLOCK = bytes(1024 * 1024)
ONE_CORE_S = 0.4
ALL_CORES_S = 0.8
THREADS_MAX = 256
MEMORY_S = 0.5
# Larger than the caches of most CPUs, small enough not to be missed.
COPY_BYTES = 64 * 1024 * 1024
COPY_SHARE_OF_FREE = 8

STA_UNSYNC = 0x40
STA_NANO = 0x2000


def probe(asked: Asked) -> Reading:
    """About three seconds."""
    steal = Steal()
    return joined(
        one_core(),
        all_cores(asked.cores),
        memory(),
        disk(asked.directory),
        pressure(),
        clock(),
        steal.reading(),
    )


def one_core() -> Reading:
    """The best of many short runs: what the core can do, even if others use it in between."""
    found = nothing()
    found.figures["cpu_one_mbs"] = max(repeated(_hash_rate, ONE_CORE_S))
    return found


def all_cores(cores: int) -> Reading:
    """Work per CPU second with all cores at it, which heat and power limits lower, and the share of
    the cores that could be had."""
    threads = max(1, min(cores, THREADS_MAX))
    done: list[tuple[int, float]] = []

    def work() -> None:
        until, blocks = time.monotonic() + ALL_CORES_S, 0
        began = time.thread_time()
        while time.monotonic() < until:
            hashlib.blake2b(BLOCK)
            blocks += 1
        done.append((blocks, time.thread_time() - began))

    began = time.monotonic()
    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=10 * ALL_CORES_S)
    wall_s = time.monotonic() - began
    cpu_s = sum(one_s for _, one_s in done)
    found = nothing()
    found.figures["cpu_all_mbs"] = mbs(sum(blocks for blocks, _ in done) * len(BLOCK), cpu_s)
    found.figures["cpu_share_milli"] = min(1000, round(1000 * cpu_s / (wall_s * threads)))
    return found


def memory() -> Reading:
    """Bytes copied per second, the best of some copies."""
    found = nothing()
    size = min(COPY_BYTES, _free_bytes() // COPY_SHARE_OF_FREE)
    if size < MB:
        found.notes.append("memory: too little free to measure it")
        return found
    source, target = bytearray(size), bytearray(size)

    def copy() -> int:
        began = time.thread_time()
        target[:] = source
        return mbs(size, time.thread_time() - began)

    copy()  # allocates the pages
    found.figures["memory_mbs"] = max(repeated(copy, MEMORY_S))
    found.figures["memory_free_mb"] = _free_bytes() // MB
    return found


def pressure() -> Reading:
    """What the kernel says of the last ten seconds: time lost by all for want of memory."""
    found = nothing()
    for what in ("memory", "io"):
        try:
            text = Path(f"/proc/pressure/{what}").read_text()
        except OSError:
            found.notes.append(f"{what} pressure: this kernel does not report it")
            continue
        share = pressure_milli(text)
        if share is not None:
            found.figures[f"{what}_pressure_milli"] = share
    return found


def pressure_milli(text: str) -> int | None:
    """'full avg10=1.50 avg60=...' is 15 thousandths."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["full"] and len(words) > 1 and words[1].startswith("avg10="):
            return round(float(words[1].removeprefix("avg10=")) * 10)
    return None


def clock() -> Reading:
    """How far off the clock is in the kernel's view, where something synchronizes it."""
    found = nothing()
    buffer = ctypes.create_string_buffer(512)
    try:
        told = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        told = -1
    if told < 0:
        found.notes.append("clock: the kernel does not report it")
        return found
    offset, status = parse_timex(buffer.raw)
    if status & STA_UNSYNC:
        found.notes.append("clock: not synchronized, as far as the kernel knows")
    else:
        found.figures["clock_offset_us"] = abs(offset) // (1000 if status & STA_NANO else 1)
    return found


def parse_timex(data: bytes) -> tuple[int, int]:
    """Offset and status of the kernel's `struct timex`: modes, then four longs of which the first
    is the offset, then the status."""
    _, offset, _, _, _, status = struct.unpack_from("@Illlli", data)
    return offset, status


class Steal:
    """The share of CPU time that the machine's host gave to others since this was made."""

    def __init__(self) -> None:
        self._before = _ticks()

    def reading(self) -> Reading:
        found = nothing()
        before, now = self._before, _ticks()
        total = sum(now) - sum(before)
        if len(now) > 7 and total > 0:
            found.figures["steal_milli"] = round(1000 * (now[7] - before[7]) / total)
        return found


def _ticks() -> list[int]:
    try:
        line = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return []
    return [int(word) for word in line.split()[1:9]]


def _free_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _hash_rate() -> int:
    began = time.thread_time()
    hashlib.blake2b(BLOCK)
    return mbs(len(BLOCK), time.thread_time() - began)


# Probe of the disk under the node's directory: room, and bytes written and read per second.


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
