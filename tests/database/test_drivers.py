"""What every database promises to the stores on it, shown with a file and a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.postgres import Postgres

from shoal.database.base import Database
from shoal.database.lease import Lease
from shoal.database.postgres import PostgresDatabase
from shoal.database.sqlite import SqliteDatabase
from shoal.ports import StoreError

KINDS = ("sqlite", "postgres")


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    made: Database
    lease: Lease | None = None
    if request.param == "sqlite":
        made = SqliteDatabase(tmp_path / "db")
    else:
        server: Postgres = request.getfixturevalue("postgres_server")
        url = server.database()
        lease = Lease(url)
        assert lease.take("a")
        made = PostgresDatabase(url, lease)
    words = made.words
    made.prepare(
        "things",
        1,
        f"CREATE TABLE things (number {words.integer} PRIMARY KEY, name TEXT, body {words.blob});"
        f"CREATE TABLE lines (id {words.counter}, text TEXT);"
        f"CREATE TABLE pairs (a TEXT, b TEXT, PRIMARY KEY (a, b)) {words.table_end}",
    )
    yield made
    made.close()
    if lease is not None:
        lease.close()


def test_values_come_back_as_they_were_stored(database: Database) -> None:
    rows = [
        (1, "a ? ' %s $1 \n", bytes(range(256))),
        (2**63 - 1, "\0 and \ue000\ue001\ue002 \0", b""),
        (-(2**63), "", None),
        (0, None, b"\0"),
    ]
    with database.transaction() as cursor:
        cursor.executemany("INSERT INTO things VALUES (?, ?, ?)", rows)
    assert sorted(database.read("SELECT * FROM things")) == sorted(rows)
    for number, name, _ in rows[:2]:
        assert database.read("SELECT number FROM things WHERE name = ?", (name,)) == [(number,)]
    found = "SELECT number FROM things WHERE " + database.words.contains.format(column="body")
    assert database.read(found, (b"\x00\x01",)) == [(1,)]


def test_nothing_of_a_failed_transaction_is_stored(database: Database) -> None:
    one = (1, "one", b"")
    with database.transaction() as cursor:
        cursor.execute("INSERT INTO things VALUES (?, ?, ?)", one)

    def twice() -> None:
        with database.transaction() as cursor:
            cursor.execute("INSERT INTO things VALUES (?, ?, ?)", (2, "two", b""))
            cursor.executemany("INSERT INTO things VALUES (?, ?, ?)", [(3, "", b""), one])

    def mistaken() -> None:
        with database.transaction() as cursor:
            cursor.execute("INSERT INTO things VALUES (?, ?, ?)", (4, "four", b""))
            found = cursor.execute("SELECT name FROM things WHERE number = ?", (4,))
            raise ZeroDivisionError(found)

    with pytest.raises(StoreError):
        twice()
    with pytest.raises(ZeroDivisionError, match="four"):
        mistaken()
    assert database.read("SELECT * FROM things") == [one]
    with database.transaction() as cursor:  # and the next one is not disturbed
        gone = cursor.execute("DELETE FROM things RETURNING number")
    assert gone == [(1,)]


def test_text_is_sorted_by_its_bytes_and_lines_are_counted(database: Database) -> None:
    names = ["b", "B", "a", "Z", "ä", "_", "é"]
    with database.transaction() as cursor:
        cursor.executemany("INSERT INTO lines (text) VALUES (?)", [(name,) for name in names])
    read = [text for (text,) in database.read("SELECT text FROM lines ORDER BY text")]
    assert read == sorted(names)
    assert [n for (n,) in database.read("SELECT id FROM lines ORDER BY id")] == list(range(1, 8))


def test_readers_do_not_wait_for_the_writer_and_see_only_what_is_stored(
    database: Database,
) -> None:
    seen: list[object] = []

    def look() -> None:
        seen.append(database.read("SELECT count(*) FROM things"))

    with database.transaction() as cursor:
        cursor.execute("INSERT INTO things VALUES (?, ?, ?)", (1, "one", b""))
        threads = [threading.Thread(target=look) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    look()
    assert seen == [[(0,)]] * 10 + [[(1,)]]


def test_formats_are_brought_up_step_by_step_and_newer_ones_are_refused(
    database: Database,
) -> None:
    steps = {1: "ALTER TABLE things ADD COLUMN more TEXT", 2: "UPDATE things SET more = name"}
    with database.transaction() as cursor:
        cursor.execute("INSERT INTO things VALUES (?, ?, ?)", (1, "one", b""))
    database.prepare("things", 3, "CREATE TABLE IF NOT EXISTS others (a TEXT)", steps)
    assert database.read("SELECT more FROM things") == [("one",)]
    with pytest.raises(StoreError, match="its format is 3, this one reads 2"):
        database.prepare("things", 2, "")
