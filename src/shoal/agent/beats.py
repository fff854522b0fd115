"""Receives the members' beats, and accepts only those whose sender it can verify."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shoal.agent.processes import Processes
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.progress import BEAT_BYTES_MAX, Beat, Progress
from shoal.model.report import Began, Idle
from shoal.model.series import NodeSample

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


# Which members hold GPUs without using them: by GPU load where the driver reports it, else CPU.


LOOK_S = 5.0
# A driver's figure covers up to this time before, when the GPU may have been another's.
STALE_MS = 1_500
# The first line of a member tells its start-up only if it comes soon, because many work in silence,
# and not at once, because many begin with a greeting.
OUTPUT_S_MIN, OUTPUT_S_MAX = 5.0, 120.0
STARTUP_S_MAX = 1_800.0  # after that, nothing is learned
# A process that only waits uses less than this share of one core.
CPU_PART = 0.01
TOLD_S = 5.0  # shorter idle times are not reported


class Seen:
    """What a member had used when it was last seen active."""

    __slots__ = ("cpu_s", "since", "step")

    def __init__(self, since: float, cpu_s: float, step: int) -> None:
        self.since = since
        self.cpu_s = cpu_s
        self.step = step


class IdleWatch:
    """A member is active if one of its GPUs is busy. Where no driver reports GPU load, CPU time is
    used instead: a process that computes nothing feeds no GPU either."""

    def __init__(
        self, processes: Processes, beats: Beats, silent: Callable[[MemberRef], bool]
    ) -> None:
        """`silent`: whether a member has written nothing."""
        self._processes = processes
        self._beats = beats
        self._silent = silent
        self._gpus: dict[MemberRef, tuple[int, ...]] = {}
        self._seen: dict[MemberRef, Seen] = {}
        self._looked = 0.0
        self._sample: NodeSample | None = None
        self._starting: dict[MemberRef, float] = {}  # since when; none of them has worked yet
        self._began: dict[MemberRef, Began] = {}

    def expect(self, launch: Launch) -> None:
        """Its process starts, or goes on after a sleep."""
        if launch.gpus:
            now = time.monotonic()
            if not self._gpus:
                self._looked = now
            self._gpus[launch.ref] = launch.gpus
            self._seen[launch.ref] = Seen(now, 0.0, self._beats.step(launch.ref) or 0)

    def starts(self, ref: MemberRef) -> None:
        """It is new, so that it has a start-up."""
        if ref in self._gpus:
            self._starting[ref] = time.monotonic()

    def rests(self, ref: MemberRef) -> None:
        """It sleeps, which is not idle. From `expect` on, it is seen as new."""
        self._gpus.pop(ref, None)
        self._seen.pop(ref, None)
        self._starting.pop(ref, None)

    def began(self) -> tuple[Began, ...]:
        return tuple(self._began.values())

    def idle(self, sample: NodeSample | None) -> tuple[Idle, ...]:
        """Members that have been idle for a while. Called often, measures seldom."""
        self._sample = sample or self._sample
        now = time.monotonic()
        if self._starting:
            self._look_at_starts(sample, now)
        if self._gpus and now - self._looked >= LOOK_S:
            self._look(now)
            self._looked = now
        least = TOLD_S + LOOK_S
        return tuple(
            Idle(ref, int((now - seen.since) * 1000))
            for ref, seen in self._seen.items()
            if now - seen.since >= least
        )

    def _look_at_starts(self, sample: NodeSample | None, now: float) -> None:
        for ref, since in list(self._starting.items()):
            after_ms = int((now - since) * 1000)
            by = "steps" if self._beats.step(ref) else self._sign(ref, sample, after_ms)
            if by and (by != "output" or after_ms >= OUTPUT_S_MIN * 1000):
                self._began[ref] = Began(ref, after_ms, by)
            if by or after_ms > STARTUP_S_MAX * 1000:
                del self._starting[ref]

    def _sign(self, ref: MemberRef, sample: NodeSample | None, after_ms: int) -> str:
        """By what a member shows that it works; empty: by nothing yet. Where the driver tells of
        its GPUs, and nobody else has a part of them, only their use counts."""
        gpus = self._gpus.get(ref, ())
        alone = not any(set(gpus) & set(some) for one, some in self._gpus.items() if one != ref)
        if alone and self._is_told(gpus):
            used = sample is not None and any(sample.gpus[gpu].busy_milli for gpu in gpus)
            return "gpu" if used and after_ms > STALE_MS else ""
        wrote = after_ms <= OUTPUT_S_MAX * 1000 and not self._silent(ref)
        return "output" if wrote else ""

    def _is_told(self, gpus: Sequence[int]) -> bool:
        there = self._sample.gpus if self._sample is not None else ()
        return all(gpu < len(there) and there[gpu].busy_milli is not None for gpu in gpus)

    def _look(self, now: float) -> None:
        spent = session_cpu_s()
        for ref in list(self._gpus):
            session, step = self._processes.leader(ref), self._beats.step(ref) or 0
            if session is None:  # it is over
                self.rests(ref)
                self._began.pop(ref, None)
                continue
            cpu_s = spent.get(session, 0.0)
            seen = self._seen.get(ref)
            if seen is None or step != seen.step or self._uses(ref, cpu_s - seen.cpu_s, now):
                self._seen[ref] = Seen(now, cpu_s, step)
            else:
                seen.cpu_s = cpu_s

    def _uses(self, ref: MemberRef, cpu_s: float, now: float) -> bool:
        gpus = self._sample.gpus if self._sample is not None else ()
        busy = [gpus[gpu].busy_milli for gpu in self._gpus[ref] if gpu < len(gpus)]
        if busy and all(milli is not None for milli in busy):
            return any(busy)
        # Negative: one of its processes has ended, and that is activity too.
        return cpu_s < 0 or cpu_s >= CPU_PART * (now - self._looked)


def session_cpu_s(proc: Path = Path("/proc")) -> dict[int, float]:
    """CPU time by session, of living processes and of children they have waited for."""
    spent: dict[int, float] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            fields = (proc / name / "stat").read_text().rpartition(")")[2].split()
            session, used = int(fields[3]), sum(map(int, fields[11:15]))
        except (OSError, ValueError, IndexError):
            continue  # it has ended in the meantime
        spent[session] = spent.get(session, 0.0) + used / ticks
    return spent
