"""Which version has written a database, so that an older one does not misread it."""

from __future__ import annotations

from shoal.database.base import Cursor, Database
from shoal.database.formats import FORMAT, newer_text, packed_version, version_of
from shoal.ports import StoreError

_FORMAT, _VERSION = "format", "version"  # keys of the table `meta`


def refuse_newer(database: Database) -> None:
    """StoreError, in one line, if a newer version has written to it."""
    rows = database.read("SELECT key, value FROM meta WHERE key IN (?, ?)", (_FORMAT, _VERSION))
    found = {str(key): int(value) for key, value in rows}
    number = found.get(_FORMAT, 0)
    if number > FORMAT:
        raise StoreError(newer_text(database.name, version_of(found.get(_VERSION, 0)), number))


def record(cursor: Cursor) -> None:
    """In the transaction that begins an epoch: from now on, this version writes."""
    for key, value in ((_FORMAT, FORMAT), (_VERSION, packed_version())):
        cursor.execute("DELETE FROM meta WHERE key = ?", (key,))
        cursor.execute("INSERT INTO meta (key, value) VALUES (?, ?)", (key, value))
