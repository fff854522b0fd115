"""The ledger's tables: amounts by hour, node, owner and account, and how far the log is booked.

Amounts, the book's state and the place in the log are written in one transaction, so a ledger that
is killed continues from the log as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec

from shoal.database.base import Cursor, Database
from shoal.database.sqlite import Place as Where
from shoal.database.sqlite import closed, opened
from shoal.ledger.accounts import (
    EVERYBODY,
    Account,
    Debt,
    Meter,
    Move,
    Only,
    Owed,
    Place,
    Sum,
    Tokens,
)
from shoal.ledger.book_state import BookState, Hardware, Owner
from shoal.ledger.postings import Addition, Nap, Posting
from shoal.model.ledger import By
from shoal.ports import StoreDamaged

# 2: naps, and their account; 3: the mark of the last event; 4: the energy of each owner; 5: tokens;
# 6: what is owed to neighbors
PART, VERSION = "ledger", 6
_ENERGY = """
CREATE TABLE IF NOT EXISTS energy (
    hour {integer}, machine {integer}, owner {integer}, mj {integer} NOT NULL,
    gpu_us {integer} NOT NULL, PRIMARY KEY (hour, machine, owner)) {table_end};
"""
# Before 4, all owners of a machine's time drew the same.
_SHARED_OUT = """INSERT INTO energy
SELECT DISTINCT power.hour, power.machine, amounts.owner, watt_ms, power.gpu_us
FROM power JOIN amounts ON amounts.hour = power.hour AND amounts.machine = power.machine"""
# A new table is made where it is missing.
STEPS = {1: "", 2: "", 3: f"{_ENERGY}{_SHARED_OUT};DROP TABLE power", 4: "", 5: ""}
HOURS_PER_DAY = 24
# Hours become days after this, and later jobs become the "older jobs" of their tenant and user: a
# job that ended long ago is only part of a sum.
HOURS_KEPT = 40 * HOURS_PER_DAY
JOBS_KEPT_HOURS = 400 * HOURS_PER_DAY
OLDER_JOBS = "older"  # callers of tokens, too
OWNERS_REMEMBERED = 20_000
OWNERS_AT_ONCE = 500

ACCOUNTS = list(Account)  # stored by its position here: add new accounts at the end
NUMBER = {account: number for number, account in enumerate(ACCOUNTS)}

_SCHEMA = """
CREATE TABLE IF NOT EXISTS machines (
    id {counter}, node TEXT NOT NULL, model TEXT NOT NULL, gpus {integer} NOT NULL,
    UNIQUE (node, model, gpus));
CREATE TABLE IF NOT EXISTS owners (
    id {counter}, job TEXT NOT NULL, tenant TEXT NOT NULL, "user" TEXT NOT NULL,
    name TEXT NOT NULL, service TEXT NOT NULL, UNIQUE (job, tenant, "user"));
CREATE TABLE IF NOT EXISTS amounts (
    hour {integer}, machine {integer}, owner {integer}, account {integer},
    gpu_us {integer} NOT NULL, PRIMARY KEY (hour, machine, owner, account)) {table_end};
CREATE INDEX IF NOT EXISTS amounts_by_owner ON amounts (owner, hour);
CREATE TABLE IF NOT EXISTS capacity (
    hour {integer}, machine {integer}, gpu_us {integer} NOT NULL,
    PRIMARY KEY (hour, machine)) {table_end};
CREATE TABLE IF NOT EXISTS naps (
    hour {integer}, owner {integer}, slept_ms {integer} NOT NULL, gpu_us {integer} NOT NULL,
    PRIMARY KEY (hour, owner)) {table_end};
CREATE TABLE IF NOT EXISTS meters (
    id {counter}, service TEXT NOT NULL, owner TEXT NOT NULL, caller TEXT NOT NULL,
    tenant TEXT NOT NULL, UNIQUE (service, owner, caller, tenant));
CREATE TABLE IF NOT EXISTS tokens (
    hour {integer}, meter {integer}, requests {integer} NOT NULL, prompt {integer} NOT NULL,
    cached {integer} NOT NULL, generated {integer} NOT NULL,
    PRIMARY KEY (hour, meter)) {table_end};
CREATE TABLE IF NOT EXISTS owed (
    hour {integer}, neighbor TEXT, tenant TEXT, jobs {integer} NOT NULL,
    gpu_ms {integer} NOT NULL, money {integer} NOT NULL,
    PRIMARY KEY (hour, neighbor, tenant)) {table_end};
CREATE TABLE IF NOT EXISTS book (
    one {integer} PRIMARY KEY CHECK (one = 1), seq {integer} NOT NULL, mirror {blob} NOT NULL);
CREATE TABLE IF NOT EXISTS book_mark (
    one {integer} PRIMARY KEY CHECK (one = 1), seq {integer} NOT NULL, mark {integer} NOT NULL);
"""
_ADD = {
    "amounts": "ON CONFLICT (hour, machine, owner, account) DO UPDATE SET "
    "gpu_us = amounts.gpu_us + excluded.gpu_us",
    "capacity": "ON CONFLICT (hour, machine) DO UPDATE SET "
    "gpu_us = capacity.gpu_us + excluded.gpu_us",
    "energy": "ON CONFLICT (hour, machine, owner) DO UPDATE SET "
    "gpu_us = energy.gpu_us + excluded.gpu_us, mj = energy.mj + excluded.mj",
    "naps": "ON CONFLICT (hour, owner) DO UPDATE SET gpu_us = naps.gpu_us + excluded.gpu_us, "
    "slept_ms = naps.slept_ms + excluded.slept_ms",
    "tokens": "ON CONFLICT (hour, meter) DO UPDATE SET "
    + ", ".join(f"{one} = tokens.{one} + excluded.{one}" for one in Tokens._fields),
    "owed": "ON CONFLICT (hour, neighbor, tenant) DO UPDATE SET "
    + ", ".join(f"{one} = owed.{one} + excluded.{one}" for one in Owed._fields),
}
_TOKENS = ", ".join(f"CAST(sum({one}) AS BIGINT)" for one in Tokens._fields)
_OWED = ", ".join(f"CAST(sum({one}) AS BIGINT)" for one in Owed._fields)
_LIVE = "(SELECT owner FROM live_owners)"
_TOTAL = "CAST(sum(amounts.gpu_us) AS BIGINT)"  # PostgreSQL's sums are of another type
# The time of an owner, node and hour that was measured at all counts as measured as a whole.
_WITH_ENERGY = (
    "LEFT JOIN energy ON energy.hour = amounts.hour AND energy.machine = amounts.machine "
    f"AND energy.owner = amounts.owner AND energy.gpu_us > 0 AND account != {NUMBER[Account.LOST]} "
)
_MEASURED = (
    ", CAST(coalesce(sum(CASE WHEN energy.mj IS NULL THEN 0 ELSE amounts.gpu_us END), 0) AS BIGINT)"
    ", CAST(coalesce(sum(CAST(energy.mj AS DOUBLE PRECISION) / energy.gpu_us * amounts.gpu_us), 0) "
    "AS DOUBLE PRECISION)"
)

KEYS = {
    By.ACCOUNT: "''",
    By.TENANT: "owners.tenant",
    By.USER: 'owners."user"',
    By.JOB: "owners.job",
    By.NODE: "machines.node",
    By.SERVICE: "owners.service",
    By.DAY: "amounts.hour / 24 * 24",
    By.HOUR: "amounts.hour",
}


class LedgerStore:
    """What a power cut loses from a file is booked again from the log. Only the head that leads
    opens the ledger of a database."""

    def __init__(self, place: Where) -> None:
        self._place = place
        self._machines: dict[str, int] = {}  # node -> id of its present machine
        self._owners: dict[str, int] = {}
        self._database: Database = opened(place, durable=False)
        try:
            words = self._database.words._asdict()
            steps = {version: step.format(**words) for version, step in STEPS.items()}
            self._database.prepare(PART, VERSION, (_SCHEMA + _ENERGY).format(**words), steps)
            with self._database.transaction() as cursor:
                self._owners = _owners(cursor, {"": Owner("", "", "")})
        except BaseException:
            self.close()
            raise

    def load(self) -> tuple[BookState, int] | None:
        rows = self._database.read("SELECT seq, mirror FROM book")
        if not rows:
            return None
        try:
            state = msgspec.msgpack.decode(rows[0][1], type=BookState)
            machines = {
                node_id: Hardware(state.kinds[node.kind].model, node.gpus)
                for node_id, node in state.nodes.items()
            }
        except (ValueError, TypeError, KeyError) as error:
            raise StoreDamaged(f"{self._database.name} is damaged ({error!r})") from None
        with self._database.transaction() as cursor:
            for node_id, machine in machines.items():
                self._machines[node_id] = _machine(cursor, node_id, machine)
        return state, rows[0][0]

    def mark(self, seq: int) -> int:
        """Of this event, if the ledger ends with it; 0: it is not known. A log that has lost events
        has another one of its number."""
        rows = self._database.read("SELECT mark FROM book_mark WHERE seq = ?", (seq,))
        return int(rows[0][0]) if rows else 0

    def close(self) -> None:
        closed(self._place, self._database)

    # -- writing ---------------------------------------------------------------------------

    def put(
        self, entries: Iterable[Posting], state: bytes, seq: int, mark: int | None = None
    ) -> None:
        """All of it is stored, or nothing. `mark`: of the event `seq`."""
        if len(self._owners) > OWNERS_REMEMBERED:
            self._owners = {"": self._owners[""]}
        known = dict(self._machines)
        try:
            self._put(entries, state, seq, mark or 0)
        except BaseException:  # ids created in this transaction are gone with it
            self._machines, self._owners = known, {"": self._owners[""]}
            raise

    def _put(self, entries: Iterable[Posting], state: bytes, seq: int, mark: int) -> None:
        with self._database.transaction() as cursor:
            for entry in entries:
                if isinstance(entry, Move):
                    self._move(cursor, entry)
                else:
                    self._add(cursor, entry)
            cursor.execute(
                "INSERT INTO book (one, seq, mirror) VALUES (1, ?, ?) ON CONFLICT (one) "
                "DO UPDATE SET seq = excluded.seq, mirror = excluded.mirror",
                (seq, state),
            )
            cursor.execute(
                "INSERT INTO book_mark (one, seq, mark) VALUES (1, ?, ?) ON CONFLICT (one) "
                "DO UPDATE SET seq = excluded.seq, mark = excluded.mark",
                (seq, mark),
            )

    def _add(self, cursor: Cursor, adds: Addition) -> None:
        for node_id, machine in adds.machines.items():
            self._machines[node_id] = _machine(cursor, node_id, machine)
        self._owners.update(_owners(cursor, adds.owners))
        cursor.executemany(
            f"INSERT INTO amounts VALUES (?, ?, ?, ?, ?) {_ADD['amounts']}",
            [
                (
                    p.hour,
                    self._machines[p.node],
                    self._owner_of(cursor, p.job),
                    NUMBER[p.account],
                    amount,
                )
                for p, amount in adds.amounts.items()
            ],
        )
        cursor.executemany(
            f"INSERT INTO capacity VALUES (?, ?, ?) {_ADD['capacity']}",
            [(hour, self._machines[n], amount) for (hour, n), amount in adds.capacity.items()],
        )
        cursor.executemany(
            f"INSERT INTO energy VALUES (?, ?, ?, ?, ?) {_ADD['energy']}",
            [
                (hour, self._machines[node], self._owner_of(cursor, job), *both)
                for (hour, node, job), both in adds.energy.items()
            ],
        )
        cursor.executemany(
            f"INSERT INTO naps VALUES (?, ?, ?, ?) {_ADD['naps']}",
            [(hour, self._owner_of(cursor, j), *both) for (hour, j), both in adds.naps.items()],
        )

        if adds.tokens:
            meters = _meters(cursor, {meter for _, meter in adds.tokens})
            cursor.executemany(
                f"INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?) {_ADD['tokens']}",
                [(hour, meters[meter], *one) for (hour, meter), one in adds.tokens.items()],
            )

        cursor.executemany(
            f"INSERT INTO owed VALUES (?, ?, ?, ?, ?, ?) {_ADD['owed']}",
            [(hour, *debt, *one) for (hour, debt), one in adds.owed.items()],
        )

    def _move(self, cursor: Cursor, move: Move) -> None:
        owner = self._owner_of(cursor, move.job)
        rows = cursor.execute(
            "SELECT hour, machine, gpu_us FROM amounts "
            "JOIN machines ON amounts.machine = machines.id "
            "WHERE owner = ? AND hour >= ? AND account = ? AND node = ?",
            (owner, move.since, NUMBER[Account.USEFUL], move.node),
        )
        for hour, machine, amount in rows:
            kept = move.firm if hour == move.since else 0
            cursor.execute(
                "UPDATE amounts SET gpu_us = ? "
                "WHERE hour = ? AND machine = ? AND owner = ? AND account = ?",
                (kept, hour, machine, owner, NUMBER[Account.USEFUL]),
            )
            cursor.execute(
                f"INSERT INTO amounts VALUES (?, ?, ?, ?, ?) {_ADD['amounts']}",
                (hour, machine, owner, NUMBER[move.to], amount - kept),
            )

    def roll(self, now_hour: int, live: Iterable[str]) -> None:
        """Merge old hours into days, and old jobs into one; the sums stay the same. Live jobs are
        left alone, since their work may still turn out to be lost."""
        with self._database.transaction() as cursor:
            cursor.execute(
                "CREATE TEMP TABLE IF NOT EXISTS live_owners "
                f"(owner {self._database.words.integer} PRIMARY KEY)"
            )
            cursor.execute("DELETE FROM live_owners")
            owners = {self._owner_of(cursor, job) for job in live} - {None}
            cursor.executemany("INSERT INTO live_owners VALUES (?)", [(owner,) for owner in owners])
            old = (now_hour - HOURS_KEPT) // HOURS_PER_DAY * HOURS_PER_DAY
            where = "hour < ? AND hour % 24 != 0"
            ended = f"{where} AND owner NOT IN {_LIVE}"
            self._merge(cursor, "amounts", "machine, owner, account", ended, old)
            self._merge(cursor, "energy", "machine, owner", ended, old)
            self._merge(cursor, "capacity", "machine", where, old)
            self._merge(cursor, "naps", "owner", where, old)
            self._merge(cursor, "tokens", "meter", where, old)
            self._merge(cursor, "owed", "neighbor, tenant", where, old)
            self._forget_jobs(cursor, now_hour - JOBS_KEPT_HOURS)
            self._forget_callers(cursor, now_hour - JOBS_KEPT_HOURS)

    def _merge(self, cursor: Cursor, table: str, keys: str, where: str, old: int) -> None:
        more = {"energy": "sum(mj), ", "naps": "sum(slept_ms), "}
        several = {"tokens": _TOKENS, "owed": _OWED}
        sums = several.get(table) or f"{more.get(table, '')}sum(gpu_us)"
        cursor.execute(
            f"INSERT INTO {table} SELECT hour / 24 * 24, {keys}, {sums} FROM {table} "
            f"WHERE {where} GROUP BY hour / 24 * 24, {keys} {_ADD[table]}",
            (old,),
        )
        cursor.execute(f"DELETE FROM {table} WHERE {where}", (old,))

    def _forget_jobs(self, cursor: Cursor, before: int) -> None:
        cursor.execute(
            'INSERT INTO owners (job, tenant, "user", name, service) '
            """SELECT DISTINCT CAST(? AS TEXT), tenant, "user", '', '' FROM owners """
            f"JOIN amounts ON owner = owners.id WHERE hour < ? AND owner NOT IN {_LIVE} "
            "AND job NOT IN ('', ?) ON CONFLICT DO NOTHING",
            (OLDER_JOBS, before, OLDER_JOBS),
        )
        gone = (
            "owner IN (SELECT id FROM owners WHERE job NOT IN ('', ?)) AND hour < ? "
            f"AND owner NOT IN {_LIVE}"
        )
        cursor.execute(
            "INSERT INTO amounts SELECT hour, machine, older.id, account, sum(gpu_us) FROM amounts "
            "JOIN owners ON owner = owners.id JOIN owners AS older ON older.job = ? "
            'AND older.tenant = owners.tenant AND older."user" = owners."user" '
            f"WHERE {gone} GROUP BY hour, machine, older.id, account {_ADD['amounts']}",
            (OLDER_JOBS, OLDER_JOBS, before),
        )
        cursor.execute(f"DELETE FROM amounts WHERE {gone}", (OLDER_JOBS, before))
        cursor.execute(
            "INSERT INTO energy SELECT hour, machine, older.id, sum(mj), sum(gpu_us) FROM energy "
            "JOIN owners ON owner = owners.id JOIN owners AS older ON older.job = ? "
            'AND older.tenant = owners.tenant AND older."user" = owners."user" '
            f"WHERE {gone} GROUP BY hour, machine, older.id {_ADD['energy']}",
            (OLDER_JOBS, OLDER_JOBS, before),
        )
        cursor.execute(f"DELETE FROM energy WHERE {gone}", (OLDER_JOBS, before))
        cursor.execute("DELETE FROM naps WHERE owner NOT IN (SELECT owner FROM amounts)")
        cursor.execute(
            f"DELETE FROM owners WHERE job NOT IN ('', ?) AND id NOT IN {_LIVE} "
            "AND id NOT IN (SELECT owner FROM amounts)",
            (OLDER_JOBS,),
        )
        self._owners = {"": self._owners[""]}

    def _forget_callers(self, cursor: Cursor, before: int) -> None:
        """Old tokens of a tenant's keys become one caller's, for each service."""
        gone = "hour < ? AND meter IN (SELECT id FROM meters WHERE caller NOT IN ('', ?))"
        if not cursor.execute(f"SELECT 1 FROM tokens WHERE {gone} LIMIT 1", (before, OLDER_JOBS)):
            return
        cursor.execute(
            "INSERT INTO meters (service, owner, caller, tenant) "
            "SELECT DISTINCT service, owner, CAST(? AS TEXT), tenant FROM meters "
            "JOIN tokens ON meter = meters.id WHERE hour < ? ON CONFLICT DO NOTHING",
            (OLDER_JOBS, before),
        )
        cursor.execute(
            f"INSERT INTO tokens SELECT hour, older.id, {_TOKENS} FROM tokens "
            "JOIN meters ON meter = meters.id JOIN meters AS older ON older.caller = ? "
            "AND older.service = meters.service AND older.owner = meters.owner "
            f"AND older.tenant = meters.tenant WHERE {gone} GROUP BY hour, older.id "
            f"{_ADD['tokens']}",
            (OLDER_JOBS, before, OLDER_JOBS),
        )
        cursor.execute(f"DELETE FROM tokens WHERE {gone}", (before, OLDER_JOBS))
        cursor.execute("DELETE FROM meters WHERE id NOT IN (SELECT meter FROM tokens)")

    def _owner_of(self, cursor: Cursor, job_id: str) -> int | None:
        known = self._owners.get(job_id)
        if known is None:
            query = "SELECT max(id) FROM owners WHERE job = ?"
            [(known,)] = cursor.execute(query, (job_id,))
            if known is not None:
                self._owners[job_id] = known
        return known

    # -- reading ---------------------------------------------------------------------------

    def machines(self) -> list[tuple[int, str, Hardware]]:
        rows = self._database.read("SELECT id, node, model, gpus FROM machines")
        return [(id_, node, Hardware(model, gpus)) for id_, node, model, gpus in rows]

    def sums(
        self,
        by: By,
        since: int,
        until: int,
        rates: dict[int, int],
        only: Only = EVERYBODY,
        *,
        measured: bool = False,
    ) -> list[Sum]:
        """From hour `since` up to, but not including, `until`; `rates` groups machines by cost.
        `measured`: with the energy, where it was measured."""
        if not rates:
            return []
        condition, values = only.condition
        each = ", ".join(f"({int(machine)}, {int(rate)})" for machine, rate in rates.items())
        rows = self._database.read(
            f"WITH rates (machine, rate) AS (VALUES {each}) "
            f"SELECT {KEYS[by]}, max(owners.name), rate, account, {_TOTAL}"
            f"{_MEASURED if measured else ', 0, 0.0'} FROM amounts "
            "JOIN owners ON amounts.owner = owners.id "
            "JOIN machines ON amounts.machine = machines.id "
            f"JOIN rates ON rates.machine = amounts.machine {_WITH_ENERGY if measured else ''}"
            "WHERE amounts.hour >= ? AND amounts.hour < ? "
            f"{condition}GROUP BY 1, 3, 4 HAVING sum(amounts.gpu_us) != 0",
            (since, until, *values),
        )
        named = by is By.JOB
        return [
            Sum(key, name if named else "", rate, ACCOUNTS[account], *amounts)
            for key, name, rate, account, *amounts in rows
        ]

    def capacity(self, since: int, until: int) -> int:
        rows = self._database.read(
            "SELECT CAST(sum(gpu_us) AS BIGINT) FROM capacity WHERE hour >= ? AND hour < ?",
            (since, until),
        )
        return rows[0][0] or 0

    def naps(self, since: int, until: int, only: Only = EVERYBODY) -> Nap:
        """How long jobs slept in these hours, and how much GPU time they lent out by that."""
        condition, values = only.condition
        [(slept_ms, lent_us)] = self._database.read(
            "SELECT CAST(sum(slept_ms) AS BIGINT), CAST(sum(gpu_us) AS BIGINT) FROM naps "
            f"JOIN owners ON owner = owners.id WHERE hour >= ? AND hour < ? {condition}",
            (since, until, *values),
        )
        return Nap(slept_ms or 0, lent_us or 0)

    def tokens(
        self, by: By, since: int, until: int, tenant: str | None = None
    ) -> list[tuple[int, Meter, Tokens]]:
        """Of these hours, by the day or hour if that is asked for. `tenant`: that called, or owns
        the service."""
        key = KEYS[by].replace("amounts.", "tokens.") if by in (By.DAY, By.HOUR) else "0"
        theirs = "AND (tenant = ? OR owner = ?) " if tenant is not None else ""
        rows = self._database.read(
            f"SELECT {key}, service, owner, caller, tenant, {_TOKENS} FROM tokens "
            f"JOIN meters ON meter = meters.id WHERE hour >= ? AND hour < ? {theirs}"
            "GROUP BY 1, 2, 3, 4, 5",
            (since, until, *([tenant, tenant] if tenant is not None else ())),
        )
        return [(row[0], Meter(*row[1:5]), Tokens(*row[5:])) for row in rows]

    def owed(self, since: int, until: int, tenant: str | None = None) -> list[tuple[Debt, Owed]]:
        """What neighbors ran in these hours, for this tenant or for all, most GPU time first."""
        theirs = "AND tenant = ? " if tenant is not None else ""
        rows = self._database.read(
            f"SELECT neighbor, tenant, {_OWED} FROM owed WHERE hour >= ? AND hour < ? {theirs}"
            "GROUP BY 1, 2 ORDER BY 4 DESC, 1, 2",
            (since, until, *([tenant] if tenant is not None else ())),
        )
        return [(Debt(*row[:2]), Owed(*row[2:])) for row in rows]

    def spent_tokens(self, since: int, until: int) -> dict[tuple[str, str], int]:
        """By caller and tenant, of these hours: of prompts, cached or not, and generated."""
        rows = self._database.read(
            "SELECT caller, tenant, CAST(sum(prompt + generated) AS BIGINT) FROM tokens "
            "JOIN meters ON meter = meters.id WHERE hour >= ? AND hour < ? GROUP BY 1, 2",
            (since, until),
        )
        return {(caller, tenant): tokens for caller, tenant, tokens in rows}

    def measured(self, since: int, until: int) -> bool:
        """Whether the energy of any GPU was measured in these hours."""
        query = "SELECT 1 FROM energy WHERE hour >= ? AND hour < ? LIMIT 1"
        return bool(self._database.read(query, (since, until)))

    def draws(self, places: Iterable[Place]) -> dict[Place, float]:
        """What their jobs drew in that hour on that node, in mJ per GPU-microsecond. What was not
        measured is left out."""
        found: dict[Place, float] = {}
        for place in places:
            rows = self._database.read(
                "SELECT mj, gpu_us FROM energy JOIN owners ON owner = owners.id "
                "WHERE hour = ? AND machine = ? AND job = ? AND gpu_us > 0",
                (place.hour, self._machines[place.node], place.job),
            )
            if rows and place.account is not Account.LOST:
                found[place] = sum(mj for mj, _ in rows) / sum(gpu_us for _, gpu_us in rows)
        return found

    def owner(self, job_id: str) -> Owner | None:
        rows = self._database.read(
            'SELECT tenant, "user", name, service FROM owners WHERE job = ?', (job_id,)
        )
        return Owner(*rows[0]) if rows else None

    def machine_of(self, node_id: str) -> int:
        return self._machines[node_id]


def _machine(cursor: Cursor, node_id: str, machine: Hardware) -> int:
    values = (node_id, machine.model, machine.gpus)
    cursor.execute(
        "INSERT INTO machines (node, model, gpus) VALUES (?, ?, ?) ON CONFLICT DO NOTHING", values
    )
    query = "SELECT id FROM machines WHERE node = ? AND model = ? AND gpus = ?"
    return int(cursor.execute(query, values)[0][0])


def _owners(cursor: Cursor, owners: Mapping[str, Owner]) -> dict[str, int]:
    """Their ids, by job. New ones are added."""
    cursor.executemany(
        'INSERT INTO owners (job, tenant, "user", name, service) VALUES (?, ?, ?, ?, ?) '
        "ON CONFLICT DO NOTHING",
        [(job, one.tenant, one.user, one.name, one.service) for job, one in owners.items()],
    )
    found: dict[str, int] = {}
    jobs = iter(owners)
    while some := tuple(islice(jobs, OWNERS_AT_ONCE)):
        marks = ", ".join("?" * len(some))
        query = f'SELECT id, job, tenant, "user" FROM owners WHERE job IN ({marks})'
        found |= {
            job: id_
            for id_, job, tenant, user in cursor.execute(query, some)
            if (owners[job].tenant, owners[job].user) == (tenant, user)
        }
    return found


def _meters(cursor: Cursor, meters: Iterable[Meter]) -> dict[Meter, int]:
    """Their ids. New ones are added."""
    found: dict[Meter, int] = {}
    for meter in meters:
        cursor.execute(
            "INSERT INTO meters (service, owner, caller, tenant) VALUES (?, ?, ?, ?) "
            "ON CONFLICT DO NOTHING",
            meter,
        )
        query = (
            "SELECT id FROM meters WHERE service = ? AND owner = ? AND caller = ? AND tenant = ?"
        )
        found[meter] = int(cursor.execute(query, meter)[0][0])
    return found
