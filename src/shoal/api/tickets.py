"""Gives each request a ticket, and closes it when the request is over, however it ends. The same
holds for its entry at the watcher."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from shoal.api.handling import call_of
from shoal.api.principal import Principal
from shoal.api.quotas import STREAMED_BODY_BYTES, UNKNOWN_BODY_BYTES, Ask, Quotas, Ticket
from shoal.api.watcher import Entry, watched

TICKET, ENTRY = "shoal.ticket", "shoal.entry"  # in a request's scope
LENGTH_DIGITS = 20

Connection = ASGIConnection[Any, Any, Any, Any]


def tickets(app: ASGIApp) -> ASGIApp:
    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        ticket, entry = Ticket(), Entry()
        scope[TICKET], scope[ENTRY] = ticket, entry  # type: ignore[literal-required]
        try:
            await watched(entry, app, scope, receive, send)
        finally:
            ticket.close()

    return counted


def enter(
    quotas: Quotas,
    connection: Connection,
    handler: BaseRouteHandler,
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


def is_stream(connection: Connection, handler: BaseRouteHandler) -> bool:
    call = call_of(handler)
    if call is not None and call.streams:
        return True
    if b"wait_s=" not in connection.scope.get("query_string", b""):
        return False
    return connection.query_params.get("wait_s", "0") not in ("0", "0.0", "")


def _body_bytes(connection: Connection, handler: BaseRouteHandler) -> int:
    given = connection.headers.get("content-length", "")
    if not given and "transfer-encoding" not in connection.headers:
        return 0
    known = given.isascii() and given.isdigit() and len(given) < LENGTH_DIGITS
    bytes_ = int(given) if known else UNKNOWN_BODY_BYTES
    streamed = getattr(handler, "request_max_body_size", 0) is None
    return min(bytes_, STREAMED_BODY_BYTES if streamed else UNKNOWN_BODY_BYTES)
