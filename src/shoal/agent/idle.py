"""Which members hold GPUs without using them: by GPU load where the driver reports it, else CPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

from shoal.agent.beats import Beats
from shoal.agent.processes import Processes
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.report import Idle
from shoal.model.samples import NodeSample

LOOK_S = 5.0
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

    def __init__(self, processes: Processes, beats: Beats) -> None:
        self._processes = processes
        self._beats = beats
        self._gpus: dict[MemberRef, tuple[int, ...]] = {}
        self._seen: dict[MemberRef, Seen] = {}
        self._looked = 0.0
        self._sample: NodeSample | None = None

    def expect(self, launch: Launch) -> None:
        if launch.gpus:
            self._gpus[launch.ref] = launch.gpus

    def rests(self, ref: MemberRef) -> None:
        """It sleeps, which is not idle. From `expect` on, it is seen as new."""
        self._gpus.pop(ref, None)
        self._seen.pop(ref, None)

    def idle(self, sample: NodeSample | None) -> tuple[Idle, ...]:
        """Members that have been idle for a while. Called often, measures seldom."""
        self._sample = sample or self._sample
        now = time.monotonic()
        if self._gpus and now - self._looked >= LOOK_S:
            self._look(now)
            self._looked = now
        least = TOLD_S + LOOK_S
        return tuple(
            Idle(ref, int((now - seen.since) * 1000))
            for ref, seen in self._seen.items()
            if now - seen.since >= least
        )

    def _look(self, now: float) -> None:
        spent = session_cpu_s()
        for ref in list(self._gpus):
            session, step = self._processes.leader(ref), self._beats.step(ref) or 0
            if session is None:  # it is over
                del self._gpus[ref]
                self._seen.pop(ref, None)
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
