"""What stores need of a database. They write their SQL once, for SQLite and PostgreSQL alike.

Values are marked with `?`. Bytes, text, 64-bit integers and NULL are the only types. Where the two
databases differ, a query takes the words from `Database.words`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from shoal.ports import StoreDamaged, StoreError

Row = tuple[Any, ...]
Values = Sequence[object]


class StoreAway(StoreError):
    """The server does not answer. Trying again helps when it is back."""


class Deposed(StoreError):
    """Another head leads by now, so this one may not write any more."""


class Words(NamedTuple):
    """How a database says what the other says differently. `contains` has a place for a column of
    bytes, and one value."""

    blob: str  # the type of bytes
    integer: str  # the type of a 64-bit integer
    counter: str  # the type of a primary key that the database counts itself
    contains: str  # "instr({column}, ?) > 0"
    like: str  # "CAST({column} AS TEXT) LIKE ?": small and capital letters are the same
    table_end: str  # after the last bracket of a table with a key of several columns


class Cursor(Protocol):
    """Of one transaction."""

    def execute(self, query: str, values: Values = ()) -> list[Row]:
        """The rows that it returns, if it returns any."""

    def executemany(self, query: str, rows: Iterable[Values]) -> None: ...


class Database(Protocol):
    """Threads may share it: one writes at a time, and readers do not wait for it. Every call may
    raise `StoreError`, `StoreFull`, `StoreDamaged`, `StoreAway` or `Deposed`."""

    name: str  # for people: a path, or a server and its database, without a password
    words: Words
    generation: int  # grows when the connection that writes was made again

    def prepare(
        self, part: str, version: int, schema: str, steps: Mapping[int, str] | None = None
    ) -> None:
        """Make the tables of one part of the home, or bring them from an older format to this one
        by the steps from each version to the next. A newer format is refused in one line."""

    def transaction(self) -> AbstractContextManager[Cursor]:
        """A write: durable when the block ends, and nothing of it if an exception leaves the block.
        On a server it begins with a look at the lease, so only the leader gets through."""

    def read(self, query: str, values: Values = ()) -> list[Row]: ...

    def damaged(self, what: str) -> StoreDamaged:
        """For rows that are not what was written: with what helps."""

    def close(self) -> None: ...
