"""A place for a store, in a file and in a real server; and heads that take each other's lease."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.postgres import Postgres

from shoal.database.lease import Lease
from shoal.database.postgres import PostgresDatabase
from shoal.database.sqlite import Place

KINDS = ("sqlite", "postgres")


class Cluster:
    """A database that several heads share."""

    def __init__(self, server: Postgres) -> None:
        self.server = server
        self.url = server.database()
        self.opened: list[Lease | PostgresDatabase] = []

    def head(self, name: str) -> tuple[PostgresDatabase, Lease]:
        """It leads from now on. The one before it has not noticed yet: it was stopped, say."""
        lease = self.standby()
        lease.heads()  # makes the tables
        self.sql("UPDATE shoal.lease SET until_ms = 0")
        assert lease.take(name)
        database = PostgresDatabase(self.url, lease)
        self.opened.append(database)
        return database, lease

    def standby(self) -> Lease:
        """The lease of a head that does not lead."""
        lease = Lease(self.url)
        self.opened.append(lease)
        return lease

    def sql(self, command: str) -> str:
        return self.server.sql(command, self.url.rpartition("/")[2])

    def close(self) -> None:
        for one in self.opened:
            one.close()


@contextmanager
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """For a fixture with `params=KINDS`."""
    if request.param == "sqlite":
        yield tmp_path / "store.db"
        return
    cluster = Cluster(request.getfixturevalue("postgres_server"))
    try:
        yield cluster.head("a")[0]
    finally:
        cluster.close()
