"""Takes away what a finished job was given and did not use: its empty place for checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from shoal.model.events import Event, JobFinished
from shoal.model.report import Report


class Tidy:
    """A follower of the loop. No member of a finished job can be about to write there; while it
    lives, only the controller could know that."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints

    def stepped(self, report: Report, events: Sequence[Event], seq: int) -> None:  # noqa: ARG002
        for event in events:
            if isinstance(event, JobFinished):
                with contextlib.suppress(OSError):  # what was saved stays
                    os.rmdir(self._checkpoints / event.job)
