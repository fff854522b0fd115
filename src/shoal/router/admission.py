"""Who is let in when replicas are full: by priority and deadline, in a bounded queue. Pure: times
are given, in seconds."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

PRIORITY_MAX = 1_000
PATIENCE = 2.0  # times the goal for the first token: who waits longer gets 429
PATIENCE_MIN_S = 1.0
RETRY_AFTER_MAX_S = 60
PASSED_MAX = 32  # of those that may not be let in yet, and let others pass
TRY_AGAIN_S = 60.0  # before as many are let in as were too many
PACE_S = 1.0  # between two changes of a replica's places

T = TypeVar("T")


def priority_of(text: str) -> int:
    """What a header says, within bounds; ValueError if it is not a number."""
    return max(-PRIORITY_MAX, min(PRIORITY_MAX, int(text[:20])))


class Waiter(Generic[T]):
    """`until`: it is refused then. `due`: it should be let in by then. Of equal priority, those
    that can still be in time come first."""

    __slots__ = ("due", "item", "late", "priority", "seq", "until", "waits")

    def __init__(self, item: T, priority: int, due: float, until: float, seq: int) -> None:
        self.item = item
        self.priority = priority
        self.due = due
        self.until = until
        self.seq = seq
        self.late = False
        self.waits = True

    @property
    def rank(self) -> tuple[int, bool, float, int]:
        """The least is the first."""
        return (-self.priority, self.late, self.due, self.seq)

    def __lt__(self, other: Waiter[T]) -> bool:
        return self.rank < other.rank


class Queue(Generic[T]):
    """A request that is displaced or too late is handed to `refuse`. `admit` lets one in: True, or
    False if it must wait, and with it all behind it, or None if those behind it may pass."""

    def __init__(self, admit: Callable[[T], bool | None], refuse: Callable[[T, str], None]) -> None:
        self._admit = admit
        self._refuse = refuse
        self._waiting: list[Waiter[T]] = []
        self._left = 0  # of those in the list, who have gone
        self._seq = 0

    def __len__(self) -> int:
        return len(self._waiting) - self._left

    def add(self, item: T, priority: int, due: float, until: float, most: int) -> Waiter[T] | None:
        """None if it is refused: the queue is full of requests that are no less important. A more
        important one takes the place of the least important."""
        self._seq += 1
        waiter = Waiter(item, priority, due, until, self._seq)
        if len(self) >= most:
            last = max(self._standing(), default=None)
            if last is None or last < waiter:
                return None
            self._go(last)
            self._refuse(last.item, "displaced")
        heapq.heappush(self._waiting, waiter)
        return waiter

    def leave(self, waiter: Waiter[T]) -> None:
        """Its client has gone."""
        if waiter.waits:
            self._go(waiter)

    def expire(self, now: float) -> None:
        """Refuse who has waited too long; put those who cannot be in time behind the others."""
        for one in self._standing():
            if one.until <= now:
                self._go(one)
                self._refuse(one.item, "late")
            one.late = one.due <= now
        heapq.heapify(self._waiting)

    def pump(self) -> None:
        """Let in whom there is room for, in order."""
        while self._waiting:
            first = self._waiting[0]
            if first.waits:
                entered = self._admit(first.item)
                if not entered:
                    break
                first.waits = False
            else:
                self._left -= 1
            heapq.heappop(self._waiting)
        else:
            return
        if entered is None:
            for one in heapq.nsmallest(PASSED_MAX, self._standing())[1:]:
                entered = self._admit(one.item)
                if entered:
                    self._go(one)
                elif entered is False:
                    return

    def _standing(self) -> list[Waiter[T]]:
        return [one for one in self._waiting if one.waits]

    def _go(self, waiter: Waiter[T]) -> None:
        waiter.waits = False
        self._left += 1
        if self._left * 2 > len(self._waiting):
            self._waiting = self._standing()
            heapq.heapify(self._waiting)
            self._left = 0


class Pace:
    """How many requests a replica takes at a time so that its tokens come at the wanted pace: a
    tenth less when they come too slowly, one more when all places are taken and time is left."""

    SPARE = 0.9

    def __init__(self) -> None:
        self.most = 0  # 0: not limited yet
        self._changed = 0.0
        self._bad = (0, 0.0)  # so many were too many, and when

    def saw(self, itl_ms: float, goal_ms: int, batch: int, now: float) -> None:
        if not goal_ms:
            self.most = 0
        elif now - self._changed < PACE_S:
            return  # it does not show yet
        elif itl_ms > goal_ms:
            self._bad = (batch, now)
            self.most = max(1, int(min(self.most or batch, batch) * self.SPARE))
            self._changed = now
        elif self.most and itl_ms < goal_ms and batch >= self.most:
            level, when = self._bad
            if self.most + 1 < level or now - when > TRY_AGAIN_S:
                self.most += 1
                self._changed = now

    def room(self, batch: int) -> bool:
        return not self.most or batch < self.most


def has_room(batch: int, concurrency: int, pace: Pace, wait_ms: float, ttft_goal_ms: int) -> bool:
    """May a request go to this replica now? One without requests takes any, else nothing would ever
    be measured again. `wait_ms`: until its first token, as it looks."""
    if concurrency and batch >= concurrency:
        return False
    if not batch:
        return True
    return pace.room(batch) and (not ttft_goal_ms or wait_ms <= ttft_goal_ms)


def retry_after_s(queued: int, per_s: float) -> int:
    """When it may be worth to come again."""
    return max(1, min(RETRY_AFTER_MAX_S, int(queued / per_s) if per_s > 0 else RETRY_AFTER_MAX_S))
