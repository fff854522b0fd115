"""How many tasks to send at a time: enough to hide the way, few enough for an even end."""

from __future__ import annotations

TARGET_S = 0.1  # of a chunk: a hundred times what sending one costs
GROWTH_MAX = 1024  # a worker hands back what it does not get done in time, so this may be bold
CHUNK_TASKS_MAX = 1 << 16
CHUNK_BYTES_MAX = 8 << 20
SHARES = 2  # of what is left, each worker should get at least so many chunks ...
EVEN_S = 0.001  # ... unless they would be shorter than this: so uneven the end may be
WEIGHT = 0.5  # of the newest chunk


class Sizer:
    """Starts with one task, and learns from every chunk that is done."""

    def __init__(self, workers: int, fixed: int | None = None) -> None:
        self._workers = workers
        self._fixed = fixed
        self._size = 1
        self._task_s: float | None = None
        self._task_bytes = 0.0

    def size(self, left: int | None) -> int:
        """Of the next chunk; `left` is how many tasks there are still, where that is known."""
        if self._fixed is not None:
            return self._fixed
        if left is None:
            return self._size
        share = -(-left // (SHARES * self._workers))
        even = int(EVEN_S / max(self._task_s, 1e-9)) if self._task_s is not None else 1
        return max(1, min(self._size, max(share, even)))

    def learn(self, tasks: int, took_s: float, sent_bytes: int) -> None:
        """Bytes in either direction count: what is large must not wait for its neighbours."""
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
