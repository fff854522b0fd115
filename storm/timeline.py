"""Virtual time: a heap of (time, sequence, action), so that one seed is one history.

A `Clock` shows that time as a wrong clock does: somebody else's, ahead or behind, fast or slow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Timeline:
    """Actions of one instant happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._heap: list[tuple[int, int, Action]] = []
        self._sequence = 0

    def at(self, time_ms: int, action: Action) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (max(time_ms, self.now_ms), self._sequence, action))

    def after(self, delay_ms: int, action: Action) -> None:
        self.at(self.now_ms + delay_ms, action)

    def run(self, end_ms: int, done: Callable[[], bool] = lambda: False) -> None:
        """Let time pass up to `end_ms`, or until `done` after some action."""
        while self._heap and self._heap[0][0] <= end_ms:
            self.now_ms, _, action = heapq.heappop(self._heap)
            action()
            if done():
                return
        self.now_ms = end_ms


MILLION = 1_000_000


class Clock(Timeline):
    """`ahead_ms`: by so much it is wrong at the beginning. `gains`: in millionths."""

    def __init__(self, timeline: Timeline, ahead_ms: int, gains: int) -> None:
        self._timeline, self._ahead_ms, self._gains = timeline, ahead_ms, gains

    @property
    def now_ms(self) -> int:  # type: ignore[override]
        return self.shows(self._timeline.now_ms)

    def shows(self, true_ms: int) -> int:
        return self._ahead_ms + true_ms * (MILLION + self._gains) // MILLION

    def at(self, time_ms: int, action: Action) -> None:
        """Never earlier than when this clock shows that time."""
        parts = MILLION + self._gains
        true_ms = -(-(time_ms - self._ahead_ms) * MILLION // parts)
        self._timeline.at(true_ms, action)
