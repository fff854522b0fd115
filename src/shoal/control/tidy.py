"""Removes the checkpoint directory of a finished job that saved nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from shoal.model.events import Event, JobFinished
from shoal.model.report import Report


class Tidy:
    """A follower of the loop: only the controller knows that no member can still write there."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints

    def stepped(self, report: Report, events: Sequence[Event], seq: int) -> None:  # noqa: ARG002
        for event in events:
            if isinstance(event, JobFinished):
                with contextlib.suppress(OSError):  # not empty: what was saved stays
                    os.rmdir(self._checkpoints / event.job)
