"""Receives the members' beats, and accepts only those whose sender it can verify."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable

import msgspec

from shoal.model.job import MemberRef
from shoal.model.progress import BEAT_BYTES_MAX, Beat, Progress

# Datagrams read in a row before the rest of the agent gets its turn.
TAKEN_AT_ONCE_MAX = 64
# Bound on the metrics in one report; beats beyond it are reported without their metrics.
METRICS_BYTES_MAX = 256 * 1024

# A save is reported at once, but a member that saves all the time does not make its node do so.
SAVED_S = 1.0

NOBODY = -1
_CREDENTIALS = struct.Struct("3i")  # process, user, group; vouched for by the kernel
# Room for the credentials only: file descriptors that a sender attaches are dropped.
_EXTRA_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size)


class Heartbeat:
    """The newest beat of a member and when its steps last advanced."""

    __slots__ = ("advanced_at", "beat", "size")

    def __init__(self, beat: Beat, size: int, now: float) -> None:
        self.beat = beat
        self.size = size
        self.advanced_at = now


class Beats:
    def __init__(self, on_saved: Callable[[], None]) -> None:
        self._on_saved = on_saved
        self._saved_at = -SAVED_S
        self._saying: asyncio.TimerHandle | None = None
        self._living: dict[str, tuple[MemberRef, int]] = {}  # and the user that it runs as
        self._newest: dict[MemberRef, Heartbeat] = {}
        self._decode = msgspec.msgpack.Decoder(Beat).decode
        self.refused = 0
        self.name = f"shoal-beats-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._socket.bind(b"\0" + self.name.encode())  # an abstract one: no file to leave behind

    def listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self.take)

    def close(self) -> None:
        if self._saying is not None:
            self._saying.cancel()
        self._socket.close()

    def expect(self, ref: MemberRef, user: int | None = None) -> None:
        self._living[str(ref)] = ref, os.geteuid() if user is None else user

    def forget(self, ref: MemberRef) -> None:
        self._living.pop(str(ref), None)
        self._newest.pop(ref, None)

    def woke(self, ref: MemberRef) -> None:
        """It slept, so it could not advance."""
        if ref in self._newest:
            self._newest[ref].advanced_at = time.monotonic()

    def step(self, ref: MemberRef) -> int | None:
        beat = self.newest(ref)
        return beat.step if beat is not None else None

    def newest(self, ref: MemberRef) -> Beat | None:
        newest = self._newest.get(ref)
        return newest.beat if newest is not None else None

    def take(self) -> None:
        """Read some of the datagrams. The rest wait until other work had its turn."""
        for _ in range(TAKEN_AT_ONCE_MAX):
            try:
                data, extra, flags, _ = self._socket.recvmsg(BEAT_BYTES_MAX, _EXTRA_BYTES)
            except BlockingIOError:
                return
            except OSError:
                self.refused += 1
                continue
            whole = not flags & socket.MSG_TRUNC
            if not (whole and self._heard(data, _sender(extra))):
                self.refused += 1

    def progress(self) -> tuple[Progress, ...]:
        now = time.monotonic()
        room = METRICS_BYTES_MAX
        told = []
        for ref, newest in self._newest.items():
            beat = newest.beat
            room -= newest.size
            if room < 0:
                beat = msgspec.structs.replace(beat, metrics={})
            told.append(Progress(ref, beat, int((now - newest.advanced_at) * 1000)))
        return tuple(told)

    def _heard(self, data: bytes, sender: int) -> bool:
        try:
            beat = self._decode(data)
        except (msgspec.DecodeError, RecursionError):
            return False
        ref, user = self._living.get(beat.ref, (None, NOBODY))
        if ref is None or sender != user:
            return False
        now = time.monotonic()
        last = self._newest.get(ref)
        if last is None:
            self._newest[ref] = Heartbeat(beat, len(data), now)
            saved_before = 0
        else:
            saved_before = last.beat.saved_step
            if beat.steps != last.beat.steps:  # fewer: the member has started over by itself
                last.advanced_at = now
            last.beat = beat
            last.size = len(data)
        if beat.saved_step > saved_before:
            self._say_saved(now)
        return True

    def _say_saved(self, now: float) -> None:
        if self._saying is not None:
            return  # it will be in that report
        rest_s = self._saved_at + SAVED_S - now
        if rest_s > 0:
            self._saying = asyncio.get_running_loop().call_later(rest_s, self._say_later)
        else:
            self._saved_at = now
            self._on_saved()

    def _say_later(self) -> None:
        self._saying, self._saved_at = None, time.monotonic()
        self._on_saved()


def _sender(extra: list[tuple[int, int, bytes]]) -> int:
    """The user that sent it, as the kernel vouches."""
    for level, kind, content in extra:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            if len(content) < _CREDENTIALS.size:
                return NOBODY
            _, user, _ = _CREDENTIALS.unpack_from(content)
            return int(user)
    return NOBODY
