"""The job numbers and epochs that were ever given out in a home, kept outside of the database.

A job's number names its logs and its checkpoints, and an epoch decides whose commands nodes obey.
If the database is lost or an old copy is put back, neither may be given out a second time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from shoal.files import write_private
from shoal.model.events import (
    ArraySubmitted,
    ClusterRestored,
    ControllerStarted,
    Event,
    JobSubmitted,
)
from shoal.model.ids import number_of
from shoal.ports import StoreError

log = logging.getLogger("shoal.control")

# Written ahead in blocks, so that a submission seldom waits for a second file.
JOBS_AHEAD = 1_000


class Marks(msgspec.Struct, frozen=True):
    """Jobs below `job` may have been given their numbers, epochs up to `epoch` were begun."""

    job: int = 1
    epoch: int = 0


class Numbers:
    """The file with the marks, and the folders that jobs left behind."""

    def __init__(self, path: Path | None, folders: Sequence[Path] = ()) -> None:
        self._path = path
        self.written = self._read()
        self.left = 1 + max((_highest(folder) for folder in folders), default=0)

    def floor(self, next_job: int, epoch: int) -> Marks:
        """Where a controller with this database goes on. A database as new as the marks is
        believed; one that is older than the last block, or empty, is not."""
        job = max(next_job, self.left)
        if next_job == 1 or next_job + JOBS_AHEAD < self.written.job:
            job = max(job, self.written.job)
        return Marks(job, max(epoch, self.written.epoch))

    def cover(self, events: Iterable[Event]) -> None:
        """Called before these are stored."""
        job, epoch = self.written.job, self.written.epoch
        for event in events:
            if isinstance(event, JobSubmitted | ArraySubmitted):
                job = max(job, number_of(event.job) + 1)
            elif isinstance(event, ControllerStarted | ClusterRestored):
                epoch = max(epoch, event.epoch)
                job = max(job, event.first_job)
        if job > self.written.job:
            self._write(Marks(job + JOBS_AHEAD, epoch))
        elif epoch > self.written.epoch:
            try:
                self._write(Marks(job, epoch))
            except StoreError as error:  # a controller must come back on a full disk, too
                log.error("%s", error)

    def skip(self) -> None:
        """The log has lost its newest events, so the next controller must not believe it: a node
        may still run a job whose number would be given out again."""
        self._write(Marks(self.written.job + JOBS_AHEAD + 1, self.written.epoch + 1))

    def _write(self, marks: Marks) -> None:
        if self._path is not None:
            known = self._read()  # in a shared folder, another head may have written since
            marks = Marks(max(marks.job, known.job), max(marks.epoch, known.epoch))
            try:
                write_private(self._path, msgspec.json.encode(marks) + b"\n")
            except OSError as error:
                reason = f"{self._path} cannot be written ({error.strerror})"
                raise StoreError(f"{reason}: free some space, and check its owner") from None
        self.written = marks

    def _read(self) -> Marks:
        if self._path is None:
            return Marks()
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Marks)
        except FileNotFoundError:
            return Marks()
        except (OSError, msgspec.DecodeError) as error:
            log.error("%s cannot be read (%s); the folders of jobs count", self._path, error)
            return Marks()


def _highest(folder: Path) -> int:
    try:
        return max((number_of(entry.name) for entry in folder.iterdir()), default=0)
    except OSError:
        return 0
