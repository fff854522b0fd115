"""What a pair of hosts measures: how long a byte takes, and how many arrive per second.

What was sent proves nothing: it may wait in buffers on the way. So the host that receives counts,
by the time at which bytes arrive, and leaves out the beginning, when TCP is slow and a shaper still
lets a burst through. It ends when two halves of what it counted agree, or when its time is up.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from statistics import median
from typing import NamedTuple

from shoal.probes.tour_door import exactly

BLOCK_BYTES = 1024 * 1024
PINGS_WARM = 5
PINGS = 100
PINGS_MIN = 10
PINGS_S = 0.15
SKIPPED = 0.4  # of the time so far: slow start, bursts
AGREES = 0.05  # the halves of the rest differ by less
STRETCH = 3.0  # links that are unsteady are measured this much longer
ROUND_TRIPS = 20  # slow start takes about ten of them
LONG_S = 1.5  # but no longer than this
FAST_BYTES_S = 1e9  # one stream (one core) may be too slow for such a link
FAST_S = 0.1  # ... which is soon seen
STREAMS = 8
SILENT_S = 3.0
WAKE_S = 0.1  # how soon a thread notices that it is to end
SPARE_S = 5.0

# Linux can count bytes of TCP without copying them, so that a receiver keeps up with fast links.
UNCOPIED = socket.MSG_TRUNC if sys.platform == "linux" else 0
RATE = struct.Struct("!Q")
DRAINED = b"q"
PING = b"p"


class Latency(NamedTuple):
    """One way, taken as half of the round trip."""

    median_s: float
    least_s: float


def streams_for_fast() -> int:
    return max(2, min(STREAMS, os.cpu_count() or 1))


def ping(line: socket.socket) -> Latency:
    took: list[float] = []
    until = time.monotonic() + PINGS_S
    for number in range(PINGS_WARM + PINGS):
        began = time.perf_counter()
        line.sendall(PING)
        exactly(line, 1)
        if number >= PINGS_WARM:
            took.append((time.perf_counter() - began) / 2)
        if len(took) >= PINGS_MIN and time.monotonic() > until:
            break
    return Latency(median(took), min(took))


def duration_s(pair_s: float, latency: Latency) -> float:
    return max(pair_s, min(LONG_S, ROUND_TRIPS * 2 * latency.least_s))


def give(line: socket.socket, streams: list[socket.socket], limit_s: float) -> float:
    """Send as fast as it goes until the other one has counted enough; returns its bytes per second.
    The last byte goes the way of the data, so all of it has left the way when it arrives."""
    ends = threading.Event()
    threads = [_thread(_pour, one, ends) for one in streams]
    try:
        line.settimeout(limit_s)
        (rate,) = RATE.unpack(exactly(line, RATE.size))
    finally:
        _end(threads, ends)
    line.sendall(DRAINED)
    return float(rate)


def take(
    line: socket.socket, streams: list[socket.socket], least_s: float, limit_s: float
) -> float:
    """Count what arrives; returns bytes per second."""
    ends = threading.Event()
    counts: list[list[tuple[float, int]]] = [[] for _ in streams]
    threads = [
        _thread(_count, one, ends, count) for one, count in zip(streams, counts, strict=True)
    ]
    try:
        rate = _steady(counts, threads, least_s, early=len(streams) == 1)
    finally:
        _end(threads, ends)
    line.settimeout(limit_s)
    line.sendall(RATE.pack(max(1, round(rate))))
    exactly(line, 1)
    return rate


def _steady(
    counts: list[list[tuple[float, int]]],
    threads: list[threading.Thread],
    least_s: float,
    *,
    early: bool,
) -> float:
    began = time.perf_counter()
    while not any(counts):
        if time.perf_counter() > began + SILENT_S:
            raise TimeoutError("no data arrives")
        time.sleep(0.002)
    first = min(count[0][0] for count in counts if count)
    looks = [FAST_S] if early and least_s > FAST_S else []
    looks += [least_s * part for part in (1, 1.5, 2, 2.5, STRETCH)]
    rate = 0.0
    for look in looks:
        while (now := time.perf_counter()) < first + look:
            time.sleep(first + look - now)
        if not all(thread.is_alive() for thread in threads):
            raise ConnectionResetError("it hung up while it was sending")
        events = sorted(event for count in counts for event in count)
        rate, agrees = rate_of(events, first + SKIPPED * look, first + look)
        if look < least_s:
            if rate >= FAST_BYTES_S:
                break
        elif agrees:
            break
    return rate


def rate_of(events: list[tuple[float, int]], begin: float, end: float) -> tuple[float, bool]:
    """Bytes per second from the first to the last arrival within this time, and whether both halves
    of it agree. A link so slow that hardly anything arrived is taken as a whole."""
    rate = _between(events, begin, end)
    if rate is None:
        return sum(size for _, size in events) / max(1e-9, end - events[0][0]), False
    middle = (begin + end) / 2
    one, other = _between(events, begin, middle), _between(events, middle, end)
    if one is None or other is None:
        return rate, False
    return rate, abs(one - other) <= AGREES * max(one, other)


def _between(events: list[tuple[float, int]], begin: float, end: float) -> float | None:
    """The bytes that came first do not count: when they were begun to be sent is not known."""
    within = [(at, size) for at, size in events if begin <= at <= end]
    if len(within) < 3 or within[-1][0] <= within[0][0]:
        return None
    return sum(size for _, size in within[1:]) / (within[-1][0] - within[0][0])


def _thread(work: object, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def _end(threads: list[threading.Thread], ends: threading.Event) -> None:
    ends.set()
    for thread in threads:
        thread.join(timeout=SPARE_S)


def _pour(line: socket.socket, ends: threading.Event) -> None:
    block = memoryview(bytes(BLOCK_BYTES))
    line.settimeout(WAKE_S)
    with contextlib.closing(line):
        while not ends.is_set():
            try:
                line.send(block)
            except TimeoutError:
                continue
            except OSError:  # the other one has counted enough
                return
        _drop(line)


def _count(line: socket.socket, ends: threading.Event, count: list[tuple[float, int]]) -> None:
    buffer = bytearray(BLOCK_BYTES)
    line.settimeout(WAKE_S)
    with contextlib.closing(line):
        while not ends.is_set():
            try:
                got = line.recv_into(buffer, BLOCK_BYTES, UNCOPIED)
            except TimeoutError:
                continue
            except OSError:
                return
            if not got:
                return
            count.append((time.perf_counter(), got))
        _drop(line)


def _drop(line: socket.socket) -> None:
    """What still waits to be sent is dropped when the line is closed, and nobody waits for it."""
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
