"""The numbers that were given out, for a log on a server: beside the log, where every head finds
them, and where only the leader can write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from shoal.control.store.marks import Marks, Numbers
from shoal.control.store.schema import SET_META, prepare
from shoal.database.base import Database
from shoal.ports import Used

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
