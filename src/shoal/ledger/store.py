"""The ledger's file: amounts by hour, node, owner and account, and how far the log is booked.

Amounts, the book's state and the place in the log are written in one transaction, so a ledger that
is killed continues from the log as if nothing had happened.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.ledger.accounts import Account, Move
from shoal.ledger.book_state import BookState, Hardware, Owner
from shoal.ledger.postings import Addition, Posting
from shoal.ledger.power import Drawn, by_machine
from shoal.model.ledger import By
from shoal.ports import StoreDamaged, StoreError

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 5.0
PAGES_CHECKED_MAX = 16_384  # checked at the start; damage in a larger file shows when it is read
HOURS_PER_DAY = 24
# Hours become days after this, and later jobs become the "older jobs" of their tenant and user: a
# job that ended long ago is only part of a sum.
HOURS_KEPT = 40 * HOURS_PER_DAY
JOBS_KEPT_HOURS = 400 * HOURS_PER_DAY
OLDER_JOBS = "older"
OWNERS_REMEMBERED = 20_000

ACCOUNTS = list(Account)  # stored by its position here: add new accounts at the end
NUMBER = {account: number for number, account in enumerate(ACCOUNTS)}

_SCHEMA = """
CREATE TABLE IF NOT EXISTS machines (
    id INTEGER PRIMARY KEY, node TEXT NOT NULL, model TEXT NOT NULL, gpus INTEGER NOT NULL,
    UNIQUE (node, model, gpus));
CREATE TABLE IF NOT EXISTS owners (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, tenant TEXT NOT NULL, user TEXT NOT NULL,
    name TEXT NOT NULL, service TEXT NOT NULL, UNIQUE (job, tenant, user));
CREATE TABLE IF NOT EXISTS amounts (
    hour INTEGER, machine INTEGER, owner INTEGER, account INTEGER, gpu_us INTEGER NOT NULL,
    PRIMARY KEY (hour, machine, owner, account)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS amounts_by_owner ON amounts (owner, hour);
CREATE TABLE IF NOT EXISTS capacity (
    hour INTEGER, machine INTEGER, gpu_us INTEGER NOT NULL,
    PRIMARY KEY (hour, machine)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS power (
    hour INTEGER, machine INTEGER, watt_ms INTEGER NOT NULL, gpu_us INTEGER NOT NULL,
    PRIMARY KEY (hour, machine)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS book (
    one INTEGER PRIMARY KEY CHECK (one = 1), seq INTEGER NOT NULL, mirror BLOB NOT NULL);
"""
_ADD = "ON CONFLICT DO UPDATE SET gpu_us = gpu_us + excluded.gpu_us"

KEYS = {
    By.ACCOUNT: "''",
    By.TENANT: "owners.tenant",
    By.USER: "owners.user",
    By.JOB: "owners.job",
    By.NODE: "machines.node",
    By.DAY: "amounts.hour / 24 * 24",
    By.HOUR: "amounts.hour",
}


class Sum(NamedTuple):
    """A key's time in one account, on machines that cost the same."""

    key: str | int
    label: str
    rate: int
    account: Account
    gpu_us: int


class LedgerStore:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._machines: dict[str, int] = {}  # node -> id of its present machine
        self._owners: dict[str, int] = {}
        with self._clear_errors():
            self._db = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            # What a power cut loses from this file is booked again from the log.
            self._db.execute("PRAGMA synchronous = NORMAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise StoreError(f"{path} was written by another version of shoal ({version})")
            pages = self._db.execute("PRAGMA page_count").fetchone()[0]
            if version and pages <= PAGES_CHECKED_MAX:
                found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
                if found != "ok":
                    raise StoreDamaged(f"{path} is damaged ({found})")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._owners[""] = self._owner("", Owner("", "", ""))

    def load(self) -> tuple[BookState, int] | None:
        with self._clear_errors():
            row = self._db.execute("SELECT seq, mirror FROM book").fetchone()
        if row is None:
            return None
        try:
            state = msgspec.msgpack.decode(row[1], type=BookState)
            for node_id, node in state.nodes.items():
                machine = Hardware(state.kinds[node.kind].model, node.gpus)
                self._machines[node_id] = self._machine(node_id, machine)
        except (ValueError, TypeError, KeyError) as error:
            raise StoreDamaged(f"{self._path} is damaged ({error!r})") from None
        return state, row[0]

    def close(self) -> None:
        self._db.close()

    # -- writing ---------------------------------------------------------------------------

    def put(self, entries: Iterable[Posting], state: bytes, seq: int) -> None:
        """All of it is stored, or nothing."""
        if len(self._owners) > OWNERS_REMEMBERED:
            self._owners = {"": self._owners[""]}
        known = dict(self._machines)
        try:
            self._put(entries, state, seq)
        except BaseException:  # ids created in this transaction are gone with it
            self._machines, self._owners = known, {"": self._owners[""]}
            raise

    def _put(self, entries: Iterable[Posting], state: bytes, seq: int) -> None:
        with self._clear_errors(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for entry in entries:
                if isinstance(entry, Move):
                    self._move(entry)
                else:
                    self._add(entry)
            self._db.execute("INSERT OR REPLACE INTO book VALUES (1, ?, ?)", (seq, state))

    def _add(self, adds: Addition) -> None:
        for node_id, machine in adds.machines.items():
            self._machines[node_id] = self._machine(node_id, machine)
        for job_id, owner in adds.owners.items():
            self._owners[job_id] = self._owner(job_id, owner)
        self._db.executemany(
            f"INSERT INTO amounts VALUES (?, ?, ?, ?, ?) {_ADD}",
            [
                (p.hour, self._machines[p.node], self._owner_of(p.job), NUMBER[p.account], amount)
                for p, amount in adds.amounts.items()
            ],
        )
        self._db.executemany(
            f"INSERT INTO capacity VALUES (?, ?, ?) {_ADD}",
            [(hour, self._machines[n], amount) for (hour, n), amount in adds.capacity.items()],
        )

        self._db.executemany(
            f"INSERT INTO power VALUES (?, ?, ?, ?) {_ADD}, watt_ms = watt_ms + excluded.watt_ms",
            [(hour, self._machines[n], *both) for (hour, n), both in adds.power.items()],
        )

    def _move(self, move: Move) -> None:
        owner = self._owner_of(move.job)
        rows = self._db.execute(
            "SELECT hour, machine, gpu_us FROM amounts "
            "JOIN machines ON amounts.machine = machines.id "
            "WHERE owner = ? AND hour >= ? AND account = ? AND node = ?",
            (owner, move.since, NUMBER[Account.USEFUL], move.node),
        ).fetchall()
        for hour, machine, amount in rows:
            kept = move.firm if hour == move.since else 0
            self._db.execute(
                "UPDATE amounts SET gpu_us = ? "
                "WHERE hour = ? AND machine = ? AND owner = ? AND account = ?",
                (kept, hour, machine, owner, NUMBER[Account.USEFUL]),
            )
            self._db.execute(
                f"INSERT INTO amounts VALUES (?, ?, ?, ?, ?) {_ADD}",
                (hour, machine, owner, NUMBER[move.to], amount - kept),
            )

    def roll(self, now_hour: int, live: Iterable[str]) -> None:
        """Merge old hours into days, and old jobs into one; the sums stay the same. Live jobs are
        left alone, since their work may still turn out to be lost."""
        with self._clear_errors(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("CREATE TEMP TABLE IF NOT EXISTS live (owner INTEGER PRIMARY KEY)")
            self._db.execute("DELETE FROM live")
            owners = [(owner,) for job in live if (owner := self._owner_of(job)) is not None]
            self._db.executemany("INSERT OR IGNORE INTO live VALUES (?)", owners)
            old = (now_hour - HOURS_KEPT) // HOURS_PER_DAY * HOURS_PER_DAY
            where = "hour < ? AND hour % 24 != 0"
            self._db.execute(
                "INSERT INTO amounts SELECT hour / 24 * 24, machine, owner, account, sum(gpu_us) "
                f"FROM amounts WHERE {where} AND owner NOT IN live GROUP BY 1, 2, 3, 4 {_ADD}",
                (old,),
            )
            self._db.execute(f"DELETE FROM amounts WHERE {where} AND owner NOT IN live", (old,))
            self._db.execute(
                "INSERT INTO capacity SELECT hour / 24 * 24, machine, sum(gpu_us) "
                f"FROM capacity WHERE {where} GROUP BY 1, 2 {_ADD}",
                (old,),
            )
            self._db.execute(f"DELETE FROM capacity WHERE {where}", (old,))
            self._db.execute(
                "INSERT INTO power SELECT hour / 24 * 24, machine, sum(watt_ms), sum(gpu_us) "
                f"FROM power WHERE {where} GROUP BY 1, 2 {_ADD}, "
                "watt_ms = watt_ms + excluded.watt_ms",
                (old,),
            )
            self._db.execute(f"DELETE FROM power WHERE {where}", (old,))
            self._forget_jobs(now_hour - JOBS_KEPT_HOURS)

    def _forget_jobs(self, before: int) -> None:
        self._db.execute(
            "INSERT OR IGNORE INTO owners (job, tenant, user, name, service) "
            "SELECT DISTINCT ?, tenant, user, '', '' FROM owners JOIN amounts ON owner = owners.id "
            "WHERE hour < ? AND job NOT IN ('', ?)",
            (OLDER_JOBS, before, OLDER_JOBS),
        )
        gone = (
            "owner IN (SELECT id FROM owners WHERE job NOT IN ('', ?)) AND hour < ? "
            "AND owner NOT IN live"
        )
        self._db.execute(
            "INSERT INTO amounts SELECT hour, machine, older.id, account, sum(gpu_us) FROM amounts "
            "JOIN owners ON owner = owners.id JOIN owners AS older ON older.job = ? "
            "AND older.tenant = owners.tenant AND older.user = owners.user "
            f"WHERE {gone} GROUP BY 1, 2, 3, 4 {_ADD}",
            (OLDER_JOBS, OLDER_JOBS, before),
        )
        self._db.execute(f"DELETE FROM amounts WHERE {gone}", (OLDER_JOBS, before))
        self._db.execute(
            "DELETE FROM owners WHERE job NOT IN ('', ?) AND id NOT IN live "
            "AND id NOT IN (SELECT owner FROM amounts)",
            (OLDER_JOBS,),
        )
        self._owners = {"": self._owners[""]}

    # -- reading ---------------------------------------------------------------------------

    def machines(self) -> list[tuple[int, str, Hardware]]:
        with self._clear_errors():
            rows = self._db.execute("SELECT id, node, model, gpus FROM machines").fetchall()
        return [(id_, node, Hardware(model, gpus)) for id_, node, model, gpus in rows]

    def sums(
        self,
        by: By,
        since: int,
        until: int,
        rates: dict[int, int],
        job: str = "",
        tenant: str = "",
    ) -> list[Sum]:
        """From hour `since` up to, but not including, `until`; `rates` groups machines by cost.
        `job`, `tenant`: only what is theirs."""
        own = [(column, value) for column, value in (("job", job), ("tenant", tenant)) if value]
        with self._clear_errors():
            self._take_rates(rates)
            query = (
                f"SELECT {KEYS[by]}, max(owners.name), rate, account, sum(gpu_us) FROM amounts "
                "JOIN owners ON owner = owners.id JOIN machines ON amounts.machine = machines.id "
                "JOIN rates ON rates.machine = amounts.machine WHERE hour >= ? AND hour < ? "
                + "".join(f"AND owners.{column} = ? " for column, _ in own)
                + "GROUP BY 1, 3, 4 HAVING sum(gpu_us) != 0"
            )
            rows = self._db.execute(query, (since, until, *(value for _, value in own))).fetchall()
        named = by is By.JOB
        return [Sum(k, n if named else "", r, ACCOUNTS[a], us) for k, n, r, a, us in rows]

    def capacity(self, since: int, until: int) -> int:
        with self._clear_errors():
            row = self._db.execute(
                "SELECT sum(gpu_us) FROM capacity WHERE hour >= ? AND hour < ?", (since, until)
            ).fetchone()
        return row[0] or 0

    def drawn(self, since: int, until: int) -> dict[int, Drawn]:
        """Power of machines whose GPUs reported it; others are left out."""
        when = "hour >= ? AND hour < ?"
        with self._clear_errors():
            powers = self._db.execute(
                f"SELECT machine, sum(watt_ms), sum(gpu_us) FROM power WHERE {when} GROUP BY 1",
                (since, until),
            ).fetchall()
            amounts = (
                powers
                and self._db.execute(
                    f"SELECT machine, account, sum(gpu_us) FROM amounts WHERE {when} "
                    "AND machine IN (SELECT machine FROM power) GROUP BY 1, 2",
                    (since, until),
                ).fetchall()
            )
        return by_machine(powers, [(m, ACCOUNTS[account], us) for m, account, us in amounts])

    def owner(self, job_id: str) -> Owner | None:
        with self._clear_errors():
            row = self._db.execute(
                "SELECT tenant, user, name, service FROM owners WHERE job = ?", (job_id,)
            ).fetchone()
        return Owner(*row) if row else None

    def machine_of(self, node_id: str) -> int:
        return self._machines[node_id]

    # -- helpers ---------------------------------------------------------------------------

    def _take_rates(self, rates: dict[int, int]) -> None:
        self._db.execute(
            "CREATE TEMP TABLE IF NOT EXISTS rates (machine INTEGER PRIMARY KEY, rate INTEGER)"
        )
        self._db.execute("DELETE FROM rates")
        self._db.executemany("INSERT INTO rates VALUES (?, ?)", rates.items())

    def _machine(self, node_id: str, machine: Hardware) -> int:
        values = (node_id, machine.model, machine.gpus)
        self._db.execute("INSERT OR IGNORE INTO machines VALUES (NULL, ?, ?, ?)", values)
        query = "SELECT id FROM machines WHERE node = ? AND model = ? AND gpus = ?"
        return int(self._db.execute(query, values).fetchone()[0])

    def _owner(self, job_id: str, owner: Owner) -> int:
        values = (job_id, owner.tenant, owner.user, owner.name, owner.service)
        self._db.execute("INSERT OR IGNORE INTO owners VALUES (NULL, ?, ?, ?, ?, ?)", values)
        query = "SELECT id FROM owners WHERE job = ? AND tenant = ? AND user = ?"
        return int(self._db.execute(query, values[:3]).fetchone()[0])

    def _owner_of(self, job_id: str) -> int | None:
        known = self._owners.get(job_id)
        if known is None:
            query = "SELECT max(id) FROM owners WHERE job = ?"
            known = self._owners[job_id] = self._db.execute(query, (job_id,)).fetchone()[0]
        return known

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError) as error:
            if any(word in str(error) for word in ("malformed", "not a database", "decode")):
                raise StoreDamaged(f"{self._path} is damaged ({error})") from error
            advice = "free some space" if "full" in str(error) else "restore it, or move it away"
            raise StoreError(f"{self._path}: {error}; {advice}") from error
