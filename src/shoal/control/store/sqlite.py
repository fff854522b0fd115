"""The embedded store: one SQLite file, on a disk that may be full."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.control.store.events import EventStore
from shoal.control.store.marks import Numbers
from shoal.control.store.spare import Spare
from shoal.database.base import Row
from shoal.database.sqlite import SqliteDatabase
from shoal.ports import StoreFull

TIGHT_PAGES, USUAL_PAGES = 16, 1_000  # of the journal, before they are put into the file


class SqliteStore(EventStore):
    """An event log that keeps spare room, so that jobs can end on a full disk."""

    def __init__(
        self, path: Path, numbers: Numbers | None = None, spare: Path | None = None
    ) -> None:
        self._file = SqliteDatabase(
            path,
            advice="Jobs on the nodes go on. Put a backup back with: shoal restore FILE --replace, "
            f"or save what can be read with: shoal salvage --home {path.parent}",
        )
        super().__init__(self._file, numbers or Numbers(None))
        self.spare = Spare(spare)

    def _append(self, rows: Sequence[Row], jobs: Sequence[Row], changes: Sequence[Row]) -> None:
        try:
            super()._append(rows, jobs, changes)
        except StoreFull as error:
            if not self.spare.give_up():
                raise
            self.alarms.raise_("full", f"{error}; new jobs are refused until then")
            # The journal is overwritten again and again, and does not use up the freed room.
            self._file.journal_pages(TIGHT_PAGES)
            super()._append(rows, jobs, changes)
        self.relax()

    def relax(self) -> None:
        if self.spare.tight and self.spare.take():
            self._file.journal_pages(USUAL_PAGES)
            self.alarms.clear("full")

    @property
    def tight(self) -> bool:
        return self.spare.tight
