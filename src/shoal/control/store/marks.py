"""The numbers that were ever given out in a home, kept outside of the database.

A job's number names its logs and its checkpoints, an epoch decides whose commands nodes obey, and
an attempt or an order may still be alive somewhere. If the database is lost, has lost its newest
events, or an old copy is put back, none of them may be given out a second time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from shoal.control.store.schema import SET_META, prepare
from shoal.core.state.events.arrays import ArraySubmitted
from shoal.core.state.events.cluster import ClusterRestored, ControllerStarted
from shoal.core.state.events.log import Event
from shoal.core.state.events.neighbors import JobHanded
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.events.supply import NodesOrdered
from shoal.database.base import Database
from shoal.machine.files import write_private
from shoal.model.ids import number_of
from shoal.ports import StoreError, Used

log = logging.getLogger("shoal.control")

# Written ahead in blocks, so that a submission seldom waits for a second file.
JOBS_AHEAD = 1_000
ATTEMPTS_AHEAD = 10
ORDERS_AHEAD = 100
ATTEMPTS_UNKNOWN = 100  # more than a job has had by far, if an older version has left no mark


class Marks(msgspec.Struct, frozen=True):
    """Jobs below `job` may have been given their numbers, epochs up to `epoch` were begun, and
    attempts up to `attempt` of a job and orders up to `order` may have been made."""

    job: int = 1
    epoch: int = 0
    attempt: int = 0
    order: int = 0

    def both(self, other: Marks) -> Marks:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return Marks(*map(max, mine, theirs))


class Numbers:
    """The file with the marks, and the folders that jobs left behind."""

    def __init__(self, path: Path | None, folders: Sequence[Path] = ()) -> None:
        self._path = path
        self.written = self._read()
        self.left = 1 + max((_highest(folder) for folder in folders), default=0)
        self._begun = 0  # the epoch that this process has marked: it may not be stored

    def floor(self, next_job: int, epoch: int) -> Used:
        """Where a controller with this database goes on. A database as new as the marks is
        believed; one that is older than the last block, or empty, or does not know the newest
        epoch, is not."""
        job, known = max(next_job, self.left), self.written
        old = next_job == 1 or next_job + JOBS_AHEAD < known.job
        if old:
            job = max(job, known.job)
        newest = max(epoch, known.epoch)
        if not old and (epoch >= known.epoch or known.epoch == self._begun):
            return Used(job, newest)
        attempt = known.attempt or (ATTEMPTS_UNKNOWN if known.epoch else 0)
        return Used(job, newest, attempt + 1 if attempt else 0, known.order + 1)

    def cover(self, events: Iterable[Event]) -> None:
        """Called before these are stored."""
        known = self.written
        job, epoch, attempt, order = msgspec.structs.astuple(known)
        for event in events:
            if isinstance(event, JobPlaced | JobHanded):
                attempt = max(attempt, event.attempt)
            elif isinstance(event, JobSubmitted | ArraySubmitted):
                job = max(job, number_of(event.job) + 1)
            elif isinstance(event, NodesOrdered):
                order = max(order, int(event.order[1:]))
            elif isinstance(event, ControllerStarted | ClusterRestored):
                epoch = max(epoch, event.epoch)
                job = max(job, event.first_job)
                self._begun = epoch
        ahead = Marks(
            job + JOBS_AHEAD if job > known.job else job,
            epoch,
            attempt + ATTEMPTS_AHEAD if attempt > known.attempt else attempt,
            order + ORDERS_AHEAD if order > known.order else order,
        )
        if ahead == known:
            return
        try:
            self._write(ahead)
        except StoreError as error:
            if (job, attempt, order) != (known.job, known.attempt, known.order):
                raise
            log.error("%s", error)  # a controller must come back on a full disk, too

    def skip(self) -> None:
        """The log has lost its newest events, so the next controller must not believe it: a node
        may still run a job whose number would be given out again."""
        known = self.written.both(self._read())
        self._begun = 0
        self._write(
            msgspec.structs.replace(known, job=known.job + JOBS_AHEAD + 1, epoch=known.epoch + 1)
        )

    def _write(self, marks: Marks) -> None:
        if self._path is not None:
            marks = marks.both(self._read())  # in a shared folder, another head may have written
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


# The numbers that were given out, for a log on a server: beside the log, where every head finds
# them, and where only the leader can write.


_KEYS = tuple(f"{name} mark" for name in Marks.__struct_fields__)


class ServedNumbers(Numbers):
    """`folders`: what jobs left behind in the shared folder shows numbers that a server does not
    have, if an old copy of it was put back."""

    def __init__(self, database: Database, folders: Sequence[Path] = ()) -> None:
        self._database = database
        prepare(database)
        super().__init__(None, folders)

    def floor(self, next_job: int, epoch: int) -> Used:
        self.written = self._read()  # another head may have led since then
        return super().floor(next_job, epoch)

    def _write(self, marks: Marks) -> None:
        with self._database.transaction() as cursor:
            cursor.executemany(SET_META, zip(_KEYS, msgspec.structs.astuple(marks), strict=True))
        self.written = marks

    def _read(self) -> Marks:
        rows = self._database.read("SELECT key, value FROM meta WHERE key IN (?, ?, ?, ?)", _KEYS)
        known: dict[str, int] = dict(rows)
        return Marks().both(Marks(*(known.get(key, 0) for key in _KEYS)))
