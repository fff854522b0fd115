"""In which order waiting jobs are tried: by priority, then by submission."""

from __future__ import annotations

import heapq

from shoal.core.state import Queue, Shape


class Order:
    """Walks the queue from the front, one shape at a time.

    Ideally every waiting job is tried in turn. Jobs of one shape are alike, so once one of them
    does not fit the others need no try: the walk costs in proportion to shapes and placements,
    not to the length of the queue.
    """

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._heads = [
            (-shape.priority, numbers[0], shape) for shape, numbers in queue.shapes.items()
        ]
        heapq.heapify(self._heads)

    def next(self) -> tuple[int, Shape] | None:
        """The number and shape of the next job to try."""
        if not self._heads:
            return None
        _, number, shape = heapq.heappop(self._heads)
        return number, shape

    def again(self, shape: Shape) -> None:
        """A job of this shape was placed: the next of its kind is in turn."""
        numbers = self._queue.shapes.get(shape)
        if numbers:
            heapq.heappush(self._heads, (-shape.priority, numbers[0], shape))
