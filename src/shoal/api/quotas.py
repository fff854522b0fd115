"""Limits what a sender can ask of the API at a time, once it has shown who it is.

Each request is counted three times: for its token or session, for its tenant, and for the server.
Refusals are 429 (the sender's own limit) or 503 (the server's), with Retry-After. The operator has
limits of its own and does not count for the server's, so nobody can lock the operator out. What
comes before a token is shown is bounded in `limits.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from shoal.api.handling import Handler
from shoal.api.http import Connection
from shoal.api.principal import Principal
from shoal.api.problems import BUSY_RETRY_S, Refusal
from shoal.model.identity import OPERATOR

MIB = 1 << 20
UNKNOWN_BODY_BYTES = 4 * MIB  # a body without a length counts as the longest
STREAMED_BODY_BYTES = MIB  # a body that goes to the disk as it comes is held up to this
BOOKS_MAX = 10_000
STREAM_RETRY_S = 10  # streams are long; longer than a client waits by itself


class Limits(NamedTuple):
    """A body is held in memory while its request is under way. A stream is a request that waits:
    a page, or the end of a log that is followed."""

    per_s: int  # requests a second ...
    burst: int  # ... after this many at once
    under_way: int
    body_bytes: int
    streams: int


TOKEN = Limits(200, 1_000, 64, 64 * MIB, 64)
TENANT = Limits(400, 2_000, 128, 128 * MIB, 100)
SERVER = Limits(1_000, 5_000, 512, 256 * MIB, 800)
OPERATOR_LIMITS = Limits(2_000, 20_000, 512, 256 * MIB, 400)  # over the network, all together
SOCKET = Limits(100_000, 100_000, 4_096, 1_024 * MIB, 4_096)  # the socket file in the home
ADDRESS = Limits(
    100, 500, 64, 4 * MIB, 400
)  # before a sign-in; workers of one machine meet at the head


class Ask(NamedTuple):
    """What a request takes for as long as it is under way."""

    body_bytes: int = 0
    stream: bool = False


class Book:
    """What one sender has under way, and how many requests it may send at once now."""

    __slots__ = ("at_s", "body_bytes", "left", "limits", "streams", "under_way", "who")

    def __init__(self, who: str, limits: Limits, now_s: float) -> None:
        self.who = who
        self.limits = limits
        self.at_s = now_s
        self.left = float(limits.burst)
        self.under_way = self.body_bytes = self.streams = 0

    def problem(self, ask: Ask, now_s: float) -> tuple[str, int] | None:
        """The limit that this request would exceed, and when to try again."""
        limits = self.limits
        self.left = min(limits.burst, self.left + (now_s - self.at_s) * limits.per_s)
        self.at_s = now_s
        if self.left < 1:
            wait_s = math.ceil((1 - self.left) / limits.per_s)
            return f"sends more than {limits.per_s} requests a second", max(1, wait_s)
        if ask.stream and self.streams >= limits.streams:
            return f"has {limits.streams} streams open, the most it may have", STREAM_RETRY_S
        if not ask.stream and self.under_way >= limits.under_way:
            return f"has {limits.under_way} requests under way, the most it may have", BUSY_RETRY_S
        if ask.body_bytes and self.body_bytes + ask.body_bytes > limits.body_bytes:
            most = f"{limits.body_bytes // MIB} MiB"
            return f"has request bodies under way of {most}, the most it may have", BUSY_RETRY_S
        return None

    def take(self, ask: Ask) -> None:
        self.left -= 1
        self.body_bytes += ask.body_bytes
        if ask.stream:
            self.streams += 1
        else:
            self.under_way += 1

    def give(self, ask: Ask) -> None:
        self.body_bytes -= ask.body_bytes
        if ask.stream:
            self.streams -= 1
        else:
            self.under_way -= 1

    def rests(self, now_s: float) -> bool:
        """A new book would say the same."""
        full = self.left + (now_s - self.at_s) * self.limits.per_s >= self.limits.burst
        return full and not (self.under_way or self.streams)


class Ticket:
    """Of one request: where it is counted until it is over."""

    __slots__ = ("ask", "books")

    def __init__(self) -> None:
        self.books: list[Book] = []
        self.ask = Ask()

    def close(self) -> None:
        for book in self.books:
            book.give(self.ask)
        self.books = []


class Quotas:
    """The books of all senders. A book that rests is dropped when there are many."""

    def __init__(self, now_s: Callable[[], float] = monotonic, books_max: int = BOOKS_MAX) -> None:
        self._now_s = now_s
        self._most = books_max
        self._books: dict[str, Book] = {}
        self._server = Book("the server", SERVER, now_s())
        self._operator = Book("the operator", OPERATOR_LIMITS, now_s())
        self._socket = Book("the operator", SOCKET, now_s())

    def __len__(self) -> int:
        return len(self._books)

    def enter(
        self, ticket: Ticket, ask: Ask, who: Principal, *, session: str = "", local: bool = False
    ) -> None:
        """Counts the request of a known sender, or refuses it."""
        if who.user == OPERATOR and not who.token:
            self._count(ticket, ask, [self._socket if local else self._operator])
            return
        if who.key:
            own = self._book(f"key {who.key}", f"key {who.key} of {who.user}", TOKEN)
            self._count(ticket, ask, [own])
            return
        name = f"session {session[:8]}" if session else f"token {who.token}"
        own = self._book(f"{name}.{session}", f"{name} of {who.user}", TOKEN)
        tenant = self._book(f"tenant {who.tenant}", f"tenant {who.tenant}", TENANT)
        self._count(ticket, ask, [own, tenant, self._server])

    def enter_stranger(self, ticket: Ticket, ask: Ask, address: str) -> None:
        """Counts a request for something that needs no sign-in."""
        own = self._book(f"address {address}", f"address {address}", ADDRESS)
        self._count(ticket, ask, [own, self._server])

    def _count(self, ticket: Ticket, ask: Ask, books: list[Book]) -> None:
        now_s = self._now_s()
        for book in books:
            problem = book.problem(ask, now_s)
            if problem is not None:
                text, retry_s = problem
                status = 503 if book is self._server else 429
                raise Refusal(status, f"{book.who} {text}; try again in {retry_s} s", "", retry_s)
        for book in books:
            book.take(ask)
        ticket.books, ticket.ask = books, ask

    def _book(self, key: str, who: str, limits: Limits) -> Book:
        book = self._books.get(key)
        if book is None:
            if len(self._books) >= self._most:
                self._tidy()
            book = self._books[key] = Book(who, limits, self._now_s())
        return book

    def _tidy(self) -> None:
        now_s = self._now_s()
        self._books = {
            key: book
            for key, book in self._books.items()
            if book.at_s >= now_s or not book.rests(now_s)  # a new one is about to be used
        }
        if len(self._books) >= self._most:
            raise Refusal(503, "too many senders at a time; try again in 1 s", "", BUSY_RETRY_S)


# The application gives each request a ticket, and closes it when the request is over, however it
# ends. The same holds for its entry at the watcher.


TICKET, ENTRY = "shoal.ticket", "shoal.entry"  # in a request's scope
LENGTH_DIGITS = 20


def enter(
    quotas: Quotas,
    connection: Connection,
    handler: Handler,
    who: Principal | None,
    session: str = "",
) -> None:
    """`who` is None before a sign-in."""
    ticket = connection.scope.get(TICKET)
    if not isinstance(ticket, Ticket):
        return  # only its schema is asked for, without a route
    ask = Ask(_body_bytes(connection, handler), is_stream(connection, handler))
    local = connection.client is None
    if who is not None:
        quotas.enter(ticket, ask, who, session=session, local=local)
    elif not local:
        quotas.enter_stranger(ticket, ask, connection.client.host if connection.client else "")


def charge(connection: Connection, more: int) -> None:
    """The request counts as that many more: the sender's next ones wait for them."""
    ticket = connection.scope.get(TICKET)
    for book in ticket.books if isinstance(ticket, Ticket) else ():
        book.left -= more


def is_stream(connection: Connection, handler: Handler) -> bool:
    if handler.streams:
        return True
    if not connection.query:
        return False
    return dict(connection.query).get("wait_s", "0") not in ("0", "0.0", "")


def _body_bytes(connection: Connection, handler: Handler) -> int:
    given = connection.headers.get("content-length", "")
    if not given and "transfer-encoding" not in connection.headers:
        return 0
    known = given.isascii() and given.isdigit() and len(given) < LENGTH_DIGITS
    bytes_ = int(given) if known else UNKNOWN_BODY_BYTES
    most = STREAMED_BODY_BYTES if handler.body_max is None else UNKNOWN_BODY_BYTES
    return min(bytes_, most)
