"""Measures where the time of the steps went, in numbers that only grow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

clock_ns = time.perf_counter_ns


BLOCK_STEPS = 8


class Quickest:
    """How long the waits of all steps would have been, had each been as short as the shortest of
    its block of steps. A peer is late in some steps; it is hardly late in eight in a row, unless it
    always is. Steps without a wait (gradients that are only added up) are left out."""

    def __init__(self) -> None:
        self._closed_ns = self._least_ns = self._steps = 0

    def add(self, wait_ns: int) -> None:
        if wait_ns <= 0:
            return
        self._least_ns = min(self._least_ns, wait_ns) if self._steps else wait_ns
        self._steps += 1
        if self._steps == BLOCK_STEPS:
            self._closed_ns, self._steps = self.ns, 0

    @property
    def ns(self) -> int:
        return self._closed_ns + self._steps * self._least_ns


class StepTimes:
    """`compute` is the time in the loop's body without waits and saves."""

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.data_ns = 0
        self.body_ns = 0
        self.fastest_ns = 1 << 62
        self.wait_ns = 0
        self.save_ns = 0
        self._save_in_body_ns = 0
        self._compute_ns = 0
        self._wait_ns_before = 0  # at the end of the last step
        self.quickest = Quickest()
        self.quickest_on_gpu = Quickest()
        # Each returns waits that have ended since, in another thread or on a GPU. On a GPU they
        # may be of an earlier step.
        self.settle: list[Callable[[], int]] = []
        self.settle_late: list[Callable[[], int]] = []
        self._aside = threading.local()
        self._saving = False

    def waited(self, nanoseconds: int) -> None:
        """Counts a wait for peers, except during a save and in the saver's thread."""
        if not self._saving and not getattr(self._aside, "on", False):
            self.wait_ns += nanoseconds

    def step(self, data_ns: int, body_ns: int, samples: int) -> None:
        self.steps += 1
        self.samples += samples
        self.data_ns += data_ns
        self.body_ns += body_ns
        self.fastest_ns = min(self.fastest_ns, data_ns + body_ns)
        for settle in self.settle:
            self.wait_ns += settle()
        self.quickest.add(self.wait_ns - self._wait_ns_before)
        for settle in self.settle_late:
            self.wait_ns += settle()
        self._wait_ns_before = self.wait_ns

    @property
    def compute_ns(self) -> int:
        """Never decreases, although waits on a GPU become known late."""
        now = self.body_ns - self.wait_ns - self._save_in_body_ns
        self._compute_ns = max(self._compute_ns, now)
        return self._compute_ns

    @contextmanager
    def saving(self, *, in_body: bool) -> Iterator[None]:
        began = clock_ns()
        self._saving = True
        try:
            yield
        finally:
            self._saving = False
            took = clock_ns() - began
            self.save_ns += took
            if in_body:
                self._save_in_body_ns += took

    def leave_out_this_thread(self) -> None:
        self._aside.on = True

    def numbers(self) -> dict[str, int]:
        """The fields of a beat."""
        return {
            "steps": self.steps,
            "samples": self.samples,
            "compute_us": self.compute_ns // 1000,
            "wait_us": self.wait_ns // 1000,
            "transfer_us": (self.quickest.ns + self.quickest_on_gpu.ns) // 1000,
            "data_us": self.data_ns // 1000,
            "save_us": self.save_ns // 1000,
        }
