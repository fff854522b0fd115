"""Shoal's own world: jobs run on until somebody of better rank needs their GPUs.

A preempted job saves its work within the grace time, during which its GPUs stay taken; when it runs
again, on whichever nodes, it first loses its start-up overhead. A job that has just started is left
alone for a while. Gangs need real room: up to a node's GPUs on one node, larger ones whole nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.queueing_outcome import Outcome
from bench.queueing_plan import Nodes, Plan
from bench.queueing_policies import Line, Live, Policy
from bench.queueing_trace import OVERHEAD_DEFAULT_S, Overheads, TraceJob

GRACE_MS = 10_000  # a job's default `stop_grace_ms`
# Whoever starts runs for so long before somebody else may take its place, under every policy.
# More would be kinder to the jobs, but it changes what Tiresias is: 300 s make it 15 % better on
# trace3, because jobs then reach their demotion undisturbed.
RUN_MS_MIN = 60_000


def simulate(jobs: Sequence[TraceJob], policy: Policy, overheads: Overheads) -> list[Outcome]:
    return World(jobs, policy, overheads).run()


class World:
    """Virtual time over one trace. Each event: progress, ends, arrivals, one scheduling pass."""

    def __init__(self, jobs: Sequence[TraceJob], policy: Policy, overheads: Overheads) -> None:
        self._arrivals = list(reversed(jobs))
        self._policy = policy
        self._overheads = overheads
        self._line = Line(policy)
        self._now_ms = 0

    def run(self) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while self._arrivals or len(self._line):
            self._now_ms = self._next_event_ms()
            for live in self._line.running:
                self._advance(live)
            outcomes += self._finish()
            self._arrive()
            self._schedule()
        return outcomes

    def _next_event_ms(self) -> int:
        times = [self._arrivals[-1].submitted_ms] if self._arrivals else []
        for live in self._line.running:
            times.append(max(self._now_ms, live.ready_ms) + live.remaining_ms)
            change_ms = self._policy.changes_in_ms(live)
            if change_ms is not None:
                times.append(self._now_ms + change_ms)
            if self._is_fresh(live) and self._line.waiting:
                times.append(live.free_ms)
        assert times, "somebody waits, but nothing will ever happen"
        return min(times)

    def _is_fresh(self, live: Live) -> bool:
        return self._now_ms < live.free_ms

    def _advance(self, live: Live) -> None:
        before_ms = live.attained_ms
        live.attained_ms += self._now_ms - live.checked_ms
        live.remaining_ms -= max(0, self._now_ms - max(live.checked_ms, live.ready_ms))
        live.checked_ms = self._now_ms
        self._policy.progressed(live, before_ms)

    def _finish(self) -> list[Outcome]:
        ended = [live for live in self._line.running if not live.remaining_ms]
        self._line.running = [live for live in self._line.running if live.remaining_ms]
        for live in ended:
            self._policy.finished(live, self._now_ms)
        return [Outcome.of(live, self._now_ms) for live in ended]

    def _arrive(self) -> None:
        while self._arrivals and self._arrivals[-1].submitted_ms == self._now_ms:
            live = Live(self._arrivals.pop())
            self._policy.arrived(live)
            self._line.wait(live)

    def _schedule(self) -> None:
        """Everybody who may not be disturbed claims first, then all others in order of rank."""
        hopeless: set[int] = set()
        ranked = self._line.walk(hopeless, self._now_ms)
        plan = Plan(self._line.running, hopeless)
        fixed = {
            live.job.number: live.nodes
            for live in self._line.running
            if (self._is_fresh(live) or not self._policy.preempts) and plan.keep(live)
        }
        chosen: list[tuple[Live, Nodes]] = []
        for live in ranked:
            nodes = fixed.pop(live.job.number, None)
            if nodes is None:
                stays = live.running and plan.keep(live)
                nodes = live.nodes if stays else plan.place(live.job.gpus)
            if nodes is not None:
                chosen.append((live, nodes))
            elif not self._policy.skips:
                break
            if plan.full and not fixed:
                break
        self._move(chosen)

    def _move(self, chosen: Sequence[tuple[Live, Nodes]]) -> None:
        moved = [(live, nodes) for live, nodes in chosen if live.nodes != nodes]
        leaving = [live for live, _ in moved if live.running]
        for live in leaving:
            live.preemptions += 1
        stopped = self._line.settle([live for live, _ in chosen], self._now_ms)
        vacated = {node for live in (*stopped, *leaving) for node, _ in live.nodes}
        for live in stopped:
            live.nodes = ()
        for live, nodes in moved:
            self._start(live, nodes, waits=live in leaving or any(n in vacated for n, _ in nodes))

    def _start(self, live: Live, nodes: Nodes, *, waits: bool) -> None:
        job = live.job
        live.nodes = nodes
        live.ready_ms = self._now_ms
        live.free_ms = self._now_ms + max(RUN_MS_MIN, self._policy.run_ms_min(live))
        if waits:
            live.ready_ms += GRACE_MS
        if live.attained_ms:
            default_ms = OVERHEAD_DEFAULT_S * 1000
            live.ready_ms += self._overheads.get((job.gpus, job.model), default_ms)
