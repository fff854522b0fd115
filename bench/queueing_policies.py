"""The policies that are compared: a rank of the core, and what the rank must be told.

Both worlds drive them the same way. A clairvoyant policy is told what remains of a job; the others
see only what a real scheduler sees: shape, order of submission, and how long a job has run.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Container, Hashable, Iterator, Sequence
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
        "free_ms",
        "job",
        "kind",
        "nodes",
        "order",
        "place",
        "preemptions",
        "ready_ms",
        "remaining_ms",
        "running",
    )

    def __init__(self, job: TraceJob) -> None:
        self.job = job
        self.remaining_ms = job.work_ms
        self.attained_ms = 0  # time on GPUs, useful or not
        self.checked_ms = job.submitted_ms
        self.running = False
        self.kind: Hashable = None  # while it waits, these two are its place in the line
        self.order: Key = ()
        self.place = 0
        self.preemptions = 0
        # In Shoal's own world: where it runs, from when usefully, from when it may be preempted.
        self.nodes: tuple[tuple[int, int], ...] = ()
        self.ready_ms = 0
        self.free_ms = 0


class Policy:
    """Ranks jobs by what it may know."""

    # A policy that does not preempt leaves running jobs where they are.
    preempts = True
    # Whether a job that does not fit is passed over.
    skips = True
    # Under the published rules one policy is given GPUs by their number alone, wherever they are.
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

    def kind(self, live: Live) -> Hashable:
        """Waiting jobs of one kind want the same GPUs, and `order` holds among them for ever."""
        return live.job.gpus

    def order(self, live: Live) -> Key:
        return self.key(live)

    def changes_in_ms(self, live: Live) -> int | None:  # noqa: ARG002
        """How much longer a running job must run for its rank to change."""
        return None

    def run_ms_min(self, live: Live) -> int:  # noqa: ARG002
        """How long a job that starts now is left alone, where that is longer than for everybody."""
        return 0

    def promoted(self, now_ms: int) -> Sequence[Live]:  # noqa: ARG002
        """Whose rank has changed since the last call, other than by running."""
        return ()

    def arrived(self, live: Live) -> None: ...

    def progressed(self, live: Live, before_ms: int) -> None:
        """The job has run from an attained time of `before_ms` to what it has now."""

    def settled(self, running: Sequence[Live], stopped: Sequence[Live]) -> None:
        """Who runs after an event, and who has just been stopped, each in order of rank."""

    def finished(self, live: Live, now_ms: int) -> None: ...


class Fifo(Policy):
    preempts = False

    def __init__(self, name: str, *, skips: bool) -> None:
        super().__init__(name, fifo)
        self.skips = skips


class Tiresias(Policy):
    """Three levels of attained service, first come first served inside each.

    Places are numbers that grow from the front to the back. After each event the jobs that run
    stand before those that wait, and both keep their order among themselves; who arrives or is
    demoted goes to the back of its level.
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
    """Everybody who is not finished. Waiting jobs of one kind want the same GPUs and keep their
    order among themselves: a walk costs in proportion to kinds and placements, not to jobs."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kinds: dict[Hashable, list[tuple[Key, Live]]] = {}
        self.running: list[Live] = []
        self.waiting = 0

    def __len__(self) -> int:
        return self.waiting + len(self.running)

    def wait(self, live: Live) -> None:
        live.kind = self._policy.kind(live)
        live.order = self._policy.order(live)
        insort(self._kinds.setdefault(live.kind, []), (live.order, live))
        self.waiting += 1

    def walk(self, hopeless: Container[int], now_ms: int) -> Iterator[Live]:
        """In order of rank; no more jobs that want as many GPUs as has become hopeless."""
        for live in self._policy.promoted(now_ms):
            if not live.running:
                self._leave(live)
                self.wait(live)
        running = sorted((self._policy.key(live), live) for live in self.running)
        self.running = [live for _, live in running]
        waiting = self._walk_waiting(hopeless)
        both = merge(running, waiting) if self._policy.preempts else chain(running, waiting)
        return (live for _, live in both)

    def _walk_waiting(self, hopeless: Container[int]) -> Iterator[tuple[Key, Live]]:
        heads = [(self._policy.key(lives[0][1]), lives, 0) for lives in self._kinds.values()]
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
        """From now on the chosen run, and nobody else; returns those who must stop."""
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
        lives = self._kinds[live.kind]
        del lives[bisect_left(lives, (live.order,))]
        if not lives:
            del self._kinds[live.kind]
        self.waiting -= 1


def policies() -> list[Policy]:
    return [
        Policy("srtf", srtf, told=True),
        Policy("srsf", srsf, told=True),
        Tiresias(),
        Fifo("fifo", skips=False),
        Fifo("fifo+skip", skips=True),
    ]
