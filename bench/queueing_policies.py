"""The compared policies: a rank function, and what it may know.

A clairvoyant policy knows how long a job still needs. The others see only what a real scheduler
sees: shape, order of submission, and how long a job has run.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Container, Iterator, Sequence
from heapq import heapify, heappop, heappush, merge
from itertools import chain

from bench.queueing_ranks import (
    TIRESIAS_GPU_MS,
    Facts,
    Key,
    Rank,
    fifo,
    level,
    srsf,
    srtf,
    tiresias,
)
from bench.queueing_trace import TraceJob


class Live:
    """A job that was submitted and is not finished."""

    __slots__ = (
        "attained_ms",
        "checked_ms",
        "job",
        "order",
        "place",
        "preemptions",
        "remaining_ms",
        "running",
    )

    def __init__(self, job: TraceJob) -> None:
        self.job = job
        self.remaining_ms = job.work_ms
        self.attained_ms = 0  # time on GPUs, useful or not
        self.checked_ms = job.submitted_ms
        self.running = False
        self.order: Key = ()  # while it waits: its place among jobs with the same number of GPUs
        self.place = 0
        self.preemptions = 0


class Policy:
    """Ranks jobs by what it may know."""

    # A policy that does not preempt leaves running jobs where they are.
    preempts = True
    # Whether a job that does not fit is passed over.
    skips = True
    # Under the published rules one policy gets GPUs by number alone, regardless of nodes.
    counts_only = False

    def __init__(self, name: str, rank: Rank, *, told: bool = False) -> None:
        self.name = name
        self._rank = rank
        self._told = told

    def key(self, live: Live) -> Key:
        return self._rank(self.facts(live))

    def facts(self, live: Live) -> Facts:
        job = live.job
        return Facts(
            number=job.number,
            gpus=job.gpus,
            submitted_ms=job.submitted_ms,
            attained_ms=live.attained_ms,
            attained_gpu_ms=live.attained_ms * job.gpus,
            remaining_ms=live.remaining_ms if self._told else None,
            place=live.place,
        )

    def changes_in_ms(self, live: Live) -> int | None:  # noqa: ARG002
        """How much longer a running job must run until its rank changes."""
        return None

    def arrived(self, live: Live) -> None: ...

    def progressed(self, live: Live, before_ms: int) -> None:
        """The job has run from an attained time of `before_ms` to its current one."""

    def settled(self, running: Sequence[Live], stopped: Sequence[Live]) -> None:
        """The jobs that run after an event, and those just stopped, each in order of rank."""


class Fifo(Policy):
    preempts = False

    def __init__(self, name: str, *, skips: bool) -> None:
        super().__init__(name, fifo)
        self.skips = skips


class Tiresias(Policy):
    """Three levels of attained service, first come first served inside each.

    Places are numbers that grow from front to back. After each event running jobs stand before
    waiting ones, and both keep their order; a job that arrives or is demoted goes to the back of
    its level.
    """

    RUNNING = -(1 << 50)
    counts_only = True

    def __init__(self) -> None:
        super().__init__("tiresias", tiresias)
        self._count = 0

    def changes_in_ms(self, live: Live) -> int | None:
        gpus = live.job.gpus
        for threshold in TIRESIAS_GPU_MS:
            at_ms = math.ceil(threshold / 1000 / gpus) * 1000  # at a whole second, as published
            if live.attained_ms < at_ms:
                return at_ms - live.attained_ms
        return None

    def arrived(self, live: Live) -> None:
        live.place = self._next()

    def progressed(self, live: Live, before_ms: int) -> None:
        gpus = live.job.gpus
        if level(live.attained_ms * gpus) > level(before_ms * gpus):
            live.place = self._next()

    def settled(self, running: Sequence[Live], stopped: Sequence[Live]) -> None:
        for live in running:
            if live.place > self.RUNNING // 2:
                live.place = self.RUNNING + self._next()
        for live in reversed(stopped):
            if live.place < self.RUNNING // 2:
                live.place = -self._next()

    def _next(self) -> int:
        self._count += 1
        return self._count


class Line:
    """All unfinished jobs. Waiting jobs with the same number of GPUs keep their order, so a walk
    costs in proportion to sizes and placements, not to jobs."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sizes: dict[int, list[tuple[Key, Live]]] = {}
        self.running: list[Live] = []
        self.waiting = 0

    def __len__(self) -> int:
        return self.waiting + len(self.running)

    def wait(self, live: Live) -> None:
        live.order = self._policy.key(live)
        insort(self._sizes.setdefault(live.job.gpus, []), (live.order, live))
        self.waiting += 1

    def walk(self, hopeless: Container[int]) -> Iterator[Live]:
        """Jobs in order of rank, without those whose number of GPUs no longer fits."""
        running = sorted((self._policy.key(live), live) for live in self.running)
        self.running = [live for _, live in running]
        waiting = self._walk_waiting(hopeless)
        both = merge(running, waiting) if self._policy.preempts else chain(running, waiting)
        return (live for _, live in both)

    def _walk_waiting(self, hopeless: Container[int]) -> Iterator[tuple[Key, Live]]:
        heads = [(self._policy.key(lives[0][1]), lives, 0) for lives in self._sizes.values()]
        heapify(heads)
        while heads:
            key, lives, index = heappop(heads)
            live = lives[index][1]
            if live.job.gpus in hopeless:
                continue
            yield key, live
            if index + 1 < len(lives):
                heappush(heads, (self._policy.key(lives[index + 1][1]), lives, index + 1))

    def settle(self, chosen: Sequence[Live], now_ms: int) -> list[Live]:
        """Only the chosen jobs run from now on; returns those that must stop."""
        keep = {live.job.number for live in chosen}
        stopped = [live for live in self.running if live.job.number not in keep]
        for live in stopped:
            live.running = False
            live.preemptions += 1
        for live in chosen:
            if not live.running:
                self._leave(live)
                live.running = True
                live.checked_ms = now_ms
        self._policy.settled(chosen, stopped)
        for live in stopped:
            self.wait(live)
        self.running = list(chosen)
        return stopped

    def _leave(self, live: Live) -> None:
        lives = self._sizes[live.job.gpus]
        del lives[bisect_left(lives, (live.order,))]
        if not lives:
            del self._sizes[live.job.gpus]
        self.waiting -= 1


def policies() -> list[Policy]:
    return [
        Policy("srtf", srtf, told=True),
        Policy("srsf", srsf, told=True),
        Tiresias(),
        Fifo("fifo", skips=False),
        Fifo("fifo+skip", skips=True),
    ]
