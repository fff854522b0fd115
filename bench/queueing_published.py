"""The world of the published simulation: placements are cleared and built anew at every event.

Every running job loses its start-up overhead at every event, whether it moved or not, except that
an end foreseen at the event before comes at that time. The trace's README states these rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.queueing_outcome import Outcome
from bench.queueing_policies import Line, Live, Policy
from bench.queueing_trace import OVERHEAD_DEFAULT_S, Overheads, TraceJob

NODES = 8
GPUS_PER_NODE = 8
NEVER_MS = 1 << 62


def simulate(jobs: Sequence[TraceJob], policy: Policy, overheads: Overheads) -> list[Outcome]:
    line = Line(policy)
    outcomes: list[Outcome] = []
    arrivals = list(reversed(jobs))
    end_ms = change_ms = NEVER_MS
    while arrivals or len(line):
        arrival_ms = arrivals[-1].submitted_ms if arrivals else NEVER_MS
        now_ms = min(arrival_ms, end_ms, change_ms)
        assert now_ms < NEVER_MS, "somebody waits, but nothing will ever happen"
        if now_ms == end_ms:
            outcomes += _finish(line, now_ms)
        for live in sorted(line.running, key=lambda live: live.job.number):
            _advance(live, policy, now_ms, overheads)
        while arrivals and arrivals[-1].submitted_ms == now_ms:
            live = Live(arrivals.pop())
            policy.arrived(live)
            line.wait(live)
        line.settle(_choose(line, policy), now_ms)
        end_ms = min((now_ms + live.remaining_ms for live in line.running), default=NEVER_MS)
        changes = (policy.changes_in_ms(live) for live in line.running)
        change_ms = min((now_ms + c for c in changes if c is not None), default=NEVER_MS)
    return outcomes


def _finish(line: Line, now_ms: int) -> list[Outcome]:
    ended = [live for live in line.running if live.checked_ms + live.remaining_ms == now_ms]
    line.running = [live for live in line.running if live not in ended]
    for live in ended:
        live.attained_ms += now_ms - live.checked_ms
    return [Outcome.of(live, now_ms) for live in ended]


def _advance(live: Live, policy: Policy, now_ms: int, overheads: Overheads) -> None:
    elapsed_ms = now_ms - live.checked_ms
    job = live.job
    lost_ms = overheads.get((job.gpus, job.model), OVERHEAD_DEFAULT_S * 1000)
    before_ms = live.attained_ms
    live.attained_ms += elapsed_ms
    live.remaining_ms -= max(0, elapsed_ms - lost_ms)
    live.checked_ms = now_ms
    policy.progressed(live, before_ms)


def _choose(line: Line, policy: Policy) -> list[Live]:
    """Everybody who fits, tried in order of rank on an empty cluster."""
    chosen = []
    cluster = Cluster(counts_only=policy.counts_only or not policy.preempts)
    for live in line.walk(cluster.hopeless):
        if cluster.take(live.job.gpus):
            chosen.append(live)
        elif not policy.skips:
            break
        if not cluster.total:
            break
    return chosen


class Cluster:
    """Free GPUs by node. What does not fit once is not tried again: nothing is given back."""

    def __init__(self, *, counts_only: bool) -> None:
        self.total = NODES * GPUS_PER_NODE
        self._free = [self.total] if counts_only else [GPUS_PER_NODE] * NODES
        self._size = self._free[0]
        self.hopeless: set[int] = set()

    def take(self, gpus: int) -> bool:
        if gpus > self.total or gpus in self.hopeless:
            return False
        full, rest = divmod(gpus, self._size) if gpus > self._size else (0, gpus)
        empty = [index for index, free in enumerate(self._free) if free == self._size][:full]
        holds = (i for i, free in enumerate(self._free) if rest and free >= rest and i not in empty)
        last = next(holds, None)
        if len(empty) < full or (rest and last is None):
            self.hopeless.add(gpus)
            return False
        for index in empty:
            self._free[index] = 0
        if last is not None:
            self._free[last] -= rest
        self.total -= gpus
        return True
