"""A connection to a PostgreSQL server on which nothing waits without end, and its errors in our
words. psycopg is loaded here, when the first connection is made."""

from __future__ import annotations

import contextlib
import re
import select
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shoal.database.base import Deposed, Row, StoreAway, Values
from shoal.ports import StoreDamaged, StoreError, StoreFull

if TYPE_CHECKING:
    from psycopg import Connection

SCHEMA = "shoal"
PORT = "5432"
CONNECT_S = 3  # for each host of the URL; libpq knows whole seconds only
ANSWER_S = 20.0  # a server that is silent for longer does not answer
# A host that vanished is noticed by the kernel, also while nothing is being sent.
LINK = {
    "tcp_user_timeout": "3000",
    "keepalives_idle": "2",
    "keepalives_interval": "1",
    "keepalives_count": "3",
}
# One that follows another server cannot take what we write.
ROLE = {"target_session_attrs": "read-write"}
IDLE = 0  # between transactions, as libpq says it
DEPOSED = "SH001"  # raised by our own function, see lease.py

# Letters for a NUL, which PostgreSQL refuses in text, and for the mark itself.
_MARK, _NUL, _SELF = "\ue000", "\ue000\ue001", "\ue000\ue002"

_AWAY = ("08", "25006", "40", "53", "55P03", "57")  # the beginnings of codes
_DAMAGED = ("XX001", "XX002", "42P01", "42703", "3F000")
_REFUSED = (
    ("password", "check the password: ~/.pgpass or PGPASSWORD"),
    ("no pg_hba.conf entry", "the server's pg_hba.conf does not let this head in"),
    ("does not exist", "create it: docs/several-heads.md shows how"),
    ("certificate verify failed", "check sslmode and sslrootcert in the URL"),
    ("does not support SSL", "check sslmode in the URL"),
)


def load() -> Any:
    try:
        import psycopg
    except ImportError:
        text = "a cluster with a database needs psycopg"
        raise StoreError(f"{text}: pip install 'shoal[postgres]'") from None
    return psycopg


def name_of(url: str) -> str:
    """For people: hosts and database, never a password."""
    known = _parsed(url)
    hosts = str(known.get("host") or known.get("hostaddr") or "localhost").split(",")
    ports = str(known.get("port") or PORT).split(",")
    ports += ports[-1:] * (len(hosts) - len(ports))
    places = ",".join(
        host if port == PORT else f"{host}:{port}" for host, port in zip(hosts, ports, strict=False)
    )
    return f"postgresql://{places}/{known.get('dbname') or known.get('user') or ''}"


def _parsed(url: str) -> dict[str, Any]:
    psycopg = load()
    try:
        if not url.startswith(("postgresql://", "postgres://")):
            raise ValueError
        known: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(url)
    except (ValueError, psycopg.Error):  # its own message may show the password
        text = "the database's URL cannot be read"
        raise StoreError(f"{text}: write postgresql://USER@HOST:PORT/DATABASE") from None
    return known


class Server:
    """One connection. It belongs to one thread at a time."""

    def __init__(
        self,
        url: str,
        application: str,
        answer_s: float = ANSWER_S,
        settings: str = "",
        connect_s: int = CONNECT_S,
    ) -> None:
        psycopg = load()
        self.name = name_of(url)
        self._errors = psycopg.Error
        known = _parsed(url)
        known["connect_timeout"] = str(known.get("connect_timeout") or connect_s)
        options = {**LINK, **ROLE, **known, "application_name": application}
        with self.clear_errors():
            self.link: Connection[Row] = _kind(answer_s).connect(
                psycopg.conninfo.make_conninfo(**options),
                autocommit=True,
                cursor_factory=psycopg.RawCursor,
            )
        _adapt(self.link)
        limit_ms = int(answer_s * 1000)
        try:
            with self.clear_errors():
                [(encoding,)] = self.link.execute("SHOW server_encoding").fetchall()
                self.link.execute(
                    f"SET search_path = {SCHEMA}; SET synchronous_commit = on;"
                    f"SET statement_timeout = {limit_ms}; SET lock_timeout = {limit_ms};"
                    f"SET idle_in_transaction_session_timeout = {limit_ms};{settings}"
                )
            if encoding != "UTF8":
                text = f"{self.name} has the encoding {encoding}"
                raise StoreError(f"{text}: create the database with ENCODING 'UTF8'")
        except BaseException:
            self.close()
            raise

    @property
    def usable(self) -> bool:
        """False: the server closed it, or it broke. A server that is idle sends nothing else."""
        if self.link.closed or self.link.pgconn.transaction_status != IDLE:
            return False
        poll = select.poll()
        poll.register(self.link.fileno(), select.POLLIN)
        return not poll.poll(0)

    def execute(self, query: str, values: Values = ()) -> list[Row]:
        with self.clear_errors():
            return self.rows(query, values)

    def rows(self, query: str, values: Values = ()) -> list[Row]:
        """Not inside of a pipeline, where it is not yet known what a query returns."""
        cursor = self.link.execute(translated(query), bound(values), binary=bool(values))
        return [restored(row) for row in cursor.fetchall()] if cursor.description else []

    @contextmanager
    def clear_errors(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise clear_error(self.name, error) from error

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.link.close()


@lru_cache
def _kind(answer_s: float) -> type[Connection[Row]]:
    psycopg = load()

    class Bounded(psycopg.Connection):  # type: ignore[misc,name-defined]
        """psycopg wakes several times a second while it waits, and says so with a 0."""

        def wait(self, waiting: Any, *rest: Any, **more: Any) -> Any:
            until = time.monotonic() + answer_s
            try:
                return super().wait(_bounded(waiting, until), *rest, **more)
            except TimeoutError as error:
                self.close()  # an answer that comes later would belong to another question
                raise psycopg.OperationalError(str(error)) from None

    def _bounded(waiting: Any, until: float) -> Generator[Any, Any, Any]:
        try:
            wanted = next(waiting)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > until:
                    raise TimeoutError(f"no answer for {answer_s:g} s")
                wanted = waiting.send(ready)
        except StopIteration as end:
            return end.value

    return Bounded


def _adapt(link: Connection[Row]) -> None:
    """A number is always a `BIGINT`, and a `str` a `TEXT`: otherwise the same query is planned
    again for each size of number."""
    from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper
    from psycopg.types.string import StrBinaryDumper, StrDumper

    link.adapters.register_dumper(int, Int8Dumper)
    link.adapters.register_dumper(int, Int8BinaryDumper)
    link.adapters.register_dumper(str, StrBinaryDumper)
    link.adapters.register_dumper(str, StrDumper)


@lru_cache(maxsize=512)
def translated(query: str) -> str:
    """With `$1` for the first `?`. `?1` stays the first. Quoted text stays as it is."""
    number = 0

    def place(found: re.Match[str]) -> str:
        nonlocal number
        if found[0][0] != "?":
            return found[0]
        if found[1]:
            return f"${found[1]}"
        number += 1
        return f"${number}"

    return re.sub(r"'(?:[^']|'')*'|\?(\d*)", place, query)


def bound(values: Values) -> Sequence[object] | None:
    if not values:
        return None
    return [_without_nul(one) if isinstance(one, str) else one for one in values]


def _without_nul(text: str) -> str:
    if _MARK in text or "\0" in text:
        return text.replace(_MARK, _SELF).replace("\0", _NUL)
    return text


def restored(row: Row) -> Row:
    for one in row:
        if isinstance(one, str) and _MARK in one:
            return tuple(_with_nul(one) if isinstance(one, str) else one for one in row)
    return row


def _with_nul(text: str) -> str:
    return text.replace(_NUL, "\0").replace(_SELF, _MARK)


def clear_error(name: str, error: Any) -> StoreError:
    """One line, with what helps."""
    code = error.sqlstate or ""
    text = " ".join(str(error).split()) or type(error).__name__
    if code == DEPOSED:
        return Deposed("another head leads by now, so this one may not write any more")
    if code == "53100":
        return StoreFull(f"the disk of {name} is full: free some space; nothing was lost")
    if code.startswith(_DAMAGED):
        return StoreDamaged(f"{name} is damaged ({text}). Restore it from a backup")
    if code.startswith(_AWAY):
        return StoreAway(f"{name} does not answer: {text}")
    if not code and not isinstance(error, load().OperationalError):
        return StoreError(f"{name}: {text}")
    for words, help_ in _REFUSED:
        if words in text:
            return StoreError(f"{name} refuses us ({text}): {help_}")
    return StoreError(f"{name}: {text}") if code else StoreAway(f"{name} does not answer: {text}")
