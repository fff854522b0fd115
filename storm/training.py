"""Virtual members that train: steps on virtual time, reported in beats, saved from time to time."""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

from shoal.model.job import MemberRef
from shoal.model.progress import Beat, Progress

SLOW_FACTOR = 3  # a slow node takes this many times as long for a member's own work
OWN_SHARE = 4  # one part in this many of a step is the member's own work
DATA_SHARE = 8  # ... is waiting for data
SAVE_MS = 20  # a save blocks the loop for this long, within the step


class Training(NamedTuple):
    """What a member that trains does. All members of a gang make the same steps."""

    step_ms: int
    saves_every: int = 0  # steps; 0: never
    hangs_at: int = 0  # after this many steps the whole gang stands still; 0: never
    stuck: bool = False  # this member is the one that the others wait for


def loss_of(job: str, steps: int) -> float:
    """Another for each trial, and of some not a number."""
    number = zlib.crc32(job.encode()) % 23
    return math.nan if number == 22 else number + 1 / (1 + steps)


class Trainer:
    """`saved` holds the newest checkpoint of every job, as a disk that all nodes share."""

    def __init__(self, ref: MemberRef, plan: Training, saved: dict[str, int], now_ms: int) -> None:
        self.ref = ref
        self.plan = plan
        self.steps = 0
        self._saved = saved
        self._from_step = saved.get(ref.job, 0)
        self._began_ms = self._seen_ms = now_ms
        self._compute_us = self._wait_us = self._data_us = self._saves = 0

    @property
    def hangs(self) -> bool:
        return 0 < self.plan.hangs_at <= self.steps

    def go_on(self, now_ms: int, *, slow: bool) -> None:
        """What it did since the last look."""
        plan = self.plan
        steps = (now_ms - self._began_ms) // plan.step_ms
        if plan.hangs_at:
            steps = min(steps, plan.hangs_at)
        own_us = plan.step_ms * 1000 // OWN_SHARE * (SLOW_FACTOR if slow else 1)
        data_us = plan.step_ms * 1000 // DATA_SHARE
        self._compute_us += (steps - self.steps) * own_us
        self._data_us += (steps - self.steps) * data_us
        self._wait_us += (steps - self.steps) * (plan.step_ms * 1000 - own_us - data_us)
        if self.hangs and not plan.stuck:
            self._wait_us += (now_ms - self._seen_ms) * 1000
        self.steps, self._seen_ms = steps, now_ms
        if plan.saves_every:
            self._saves = steps // plan.saves_every
            saved = self._from_step + self._saves * plan.saves_every
            self._saved[self.ref.job] = max(self._saved.get(self.ref.job, 0), saved)

    def progress(self, now_ms: int) -> Progress:
        saved = self._from_step + self._saves * self.plan.saves_every
        beat = Beat(
            ref=str(self.ref),
            step=self._from_step + self.steps,
            steps=self.steps,
            compute_us=self._compute_us,
            wait_us=self._wait_us,
            transfer_us=self._wait_us // 2,
            data_us=self._data_us,
            save_us=self._saves * SAVE_MS * 1000,
            saves=self._saves,
            saved_step=saved,
            unsaved=max(0, self.steps % 20 - 16),  # sometimes some saves in a row fail
            loss=self._loss(),
        )
        quiet_ms = now_ms - self._began_ms - self.steps * self.plan.step_ms
        return Progress(self.ref, beat, quiet_ms)

    def _loss(self) -> float:
        return loss_of(self.ref.job, self.steps)
