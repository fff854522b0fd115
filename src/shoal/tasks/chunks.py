"""Decides how many tasks go into a chunk: many to hide the cost of sending, few for an even end."""

from __future__ import annotations

TARGET_S = 0.1  # duration of a chunk: a hundred times the cost of sending one
GROWTH_MAX = 1024  # can be large, because a worker hands back what it does not finish in time
CHUNK_TASKS_MAX = 1 << 16
CHUNK_BYTES_MAX = 8 << 20
SHARES = 2  # each worker should get at least this many of the remaining chunks ...
EVEN_S = 0.001  # ... unless they would be shorter than this
WEIGHT = 0.5  # of the newest chunk in the averages


class Sizer:
    """Starts with one task per chunk, and learns from every finished chunk."""

    def __init__(self, workers: int, fixed: int | None = None) -> None:
        self._workers = workers
        self._fixed = fixed
        self._size = 1
        self._task_s: float | None = None
        self._task_bytes = 0.0

    def size(self, left: int | None) -> int:
        """Tasks in the next chunk. `left`: the number of remaining tasks, if known."""
        if self._fixed is not None:
            return self._fixed
        if left is None:
            return self._size
        share = -(-left // (SHARES * self._workers))
        even = int(EVEN_S / max(self._task_s, 1e-9)) if self._task_s is not None else 1
        return max(1, min(self._size, max(share, even)))

    def learn(self, tasks: int, took_s: float, sent_bytes: int) -> None:
        """`sent_bytes` counts both directions: a large result must not wait for its neighbours."""
        task_s = took_s / tasks
        known = self._task_s
        self._task_s = task_s if known is None else WEIGHT * task_s + (1 - WEIGHT) * known
        self._task_bytes = max(sent_bytes / tasks, self._task_bytes * (1 - WEIGHT))
        fitting = min(
            TARGET_S / max(self._task_s, 1e-9), CHUNK_BYTES_MAX / max(self._task_bytes, 1.0)
        )
        most = min(self._size * GROWTH_MAX, CHUNK_TASKS_MAX) if tasks >= self._size else self._size
        self._size = max(1, min(int(fitting), most))

    def expected_s(self, tasks: int) -> float | None:
        return None if self._task_s is None else self._task_s * tasks
