"""Limits what a connection can cost before it has shown a token: bytes, time and connections.

Anyone who can reach the port can connect, so everything before the token is bounded here, where
bytes become requests. Otherwise a header could grow without end, and because the parser copies all
of it for each new piece, a few slow senders of large headers could keep the controller busy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.api.exchange import Exchange
from shoal.client.keepalive import keep_alive
from shoal.link.http import last_answer, request_head
from shoal.model.views import Problem

ADDRESS_BYTES_MAX = 8 * 1024
HEAD_BYTES_MAX = 32 * 1024  # request line and headers, or trailers
HEADERS_MAX = 100
PIPELINE_MAX = 16  # requests sent before the current one is answered
PIECE_BYTES = 16 * 1024  # fed to the parser at a time, so that it never holds much more
HEAD_S = 10.0
BODY_S = 30.0  # for a body, and beyond that ...
BODY_BYTES_PER_S = 16 * 1024  # ... the least average speed
STALL_S = 60.0  # for a client that does not read its answer
LINGER_S = 2.0  # for a client that still sends after the answer
LINGER_BYTES = 1024 * 1024
CONNECTIONS_MAX = 1000
CONNECTIONS_LEAST = 16
TENANT_PART = 4  # a quarter of the connections may be one tenant's
SILENT_S = 60  # for a client whose machine or link has gone without a word
SOLE = frozenset(
    (b"host", b"authorization", b"cookie", b"origin", b"content-type", b"x-shoal-csrf")
)
PROVEN = "shoal.proven"  # in a request's scope: called when its token or session is right


class Guest(Protocol):
    """A connection, from the moment it is accepted."""

    address: str  # empty: through the socket file

    def dismiss(self) -> None: ...


class Gate:
    """The open connections. Over the network: at most `most`, and half of them from one address;
    beyond that, the oldest without a token is closed. Connections through the socket file are
    counted separately: only the user can make them, and no other connection displaces them."""

    def __init__(self, most: int = CONNECTIONS_MAX) -> None:
        self.most = max(CONNECTIONS_LEAST, min(CONNECTIONS_MAX, most))
        self._from: dict[str, int] = {}
        self.guests: dict[Guest, None] = {}
        self._unproven: dict[Guest, None] = {}
        self._owners: dict[Guest, str] = {}  # tenants of connections that have shown a token
        self._of: dict[str, int] = {}  # tenant -> its connections

    def __len__(self) -> int:
        return len(self.guests)

    def enter(self, guest: Guest) -> bool:
        share = self.most if guest.address == "" else self.most // 2
        if self._from.get(guest.address, 0) >= share and not self._dismiss(guest.address):
            return False
        network = len(self.guests) - self._from.get("", 0)
        if guest.address and network >= self.most and not self._dismiss(None):
            return False
        self.guests[guest] = None
        self._from[guest.address] = self._from.get(guest.address, 0) + 1
        if guest.address:
            self._unproven[guest] = None
        return True

    def prove(self, guest: Guest, owner: str) -> bool:
        """It has shown a token of this tenant ("": the operator's own, who may have any number).
        False: the tenant has too many."""
        if self._owners.get(guest) == owner or guest not in self.guests:
            return True
        self._disown(guest)
        if owner and self._of.get(owner, 0) >= self.most // TENANT_PART:
            self._unproven[guest] = None
            return False
        self._unproven.pop(guest, None)
        self._owners[guest] = owner
        self._of[owner] = self._of.get(owner, 0) + 1
        return True

    def _disown(self, guest: Guest) -> None:
        owner = self._owners.pop(guest, None)
        if owner is not None:
            self._of[owner] -= 1
            if not self._of[owner]:
                del self._of[owner]

    def leave(self, guest: Guest) -> None:
        self._unproven.pop(guest, None)
        self._disown(guest)
        if guest in self.guests:
            del self.guests[guest]
            self._from[guest.address] -= 1
            if not self._from[guest.address]:
                del self._from[guest.address]

    def _dismiss(self, address: str | None) -> bool:
        for guest in self._unproven:
            if address is None or guest.address == address:
                self.leave(guest)
                guest.dismiss()
                return True
        return False


class Guard(HttpToolsProtocol):
    """uvicorn's protocol, with bounds. Each server has its own subclass: see `guarded`."""

    gate: Gate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.address = ""
        self.arrival: Guest | None = None  # what held its place during the TLS handshake
        self._silent = 0  # bytes since the parser last returned something complete
        self._received = 0  # bytes of the body
        self._began = 0.0
        self._whole = True  # the last request is complete
        self._upgrades = False  # the last request is for a websocket
        self.exchange: Exchange | None = None  # of the last request
        self.method = ""  # of the last request
        self._refusal: tuple[int, str] | None = None
        self._lingering = 0  # bytes that may still be discarded
        self._closing = False
        self._act: Callable[[], None] | None = None  # what is done when the time is over
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._rests = False  # between two requests
        self._stall: asyncio.TimerHandle | None = None

    # -- the connection ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        if self.arrival is not None:
            self.gate.leave(self.arrival)
        if self.address:
            # Otherwise a cut link would hold a stream for a quarter of an hour, or forever.
            with contextlib.suppress(OSError):  # it has gone already
                keep_alive(transport.get_extra_info("socket"), SILENT_S)
        if self.gate.enter(self):
            self._arm(HEAD_S, self._late)
        else:
            self._refuse(503, "too many connections; try again in a moment")

    def connection_lost(self, exc: Exception | None) -> None:
        self.gate.leave(self)
        self._disarm()
        if self._timer is not None:
            self._timer.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def dismiss(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            self._linger(len(data))
            return
        self._unset_keepalive_if_required()
        if self._act is None:
            self._arm(HEAD_S, self._late)
        view = memoryview(data)
        try:
            for start in range(0, len(view), PIECE_BYTES):
                piece = view[start : start + PIECE_BYTES]
                self._silent += len(piece)
                self.parser.feed_data(piece)
                if self._silent > HEAD_BYTES_MAX:
                    self._too_large("headers", HEAD_BYTES_MAX)
                if self._closing or self.transport.is_closing():
                    return
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():  # any other upgrade is ignored
                self._upgrade()
        except (httptools.HttpParserError, _Refused):
            self._refuse(*(self._refusal or (400, "this is not an HTTP request")))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None and self.address:
            self._stall = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self.flow is not None:
            super().resume_writing()

    # -- what the parser finds -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.url, self.headers = b"", []
        self._silent = self._received = 0
        self._whole = self._upgrades = False

    def on_url(self, url: bytes) -> None:
        self.url += url
        if len(self.url) > ADDRESS_BYTES_MAX:
            self._too_large("address", ADDRESS_BYTES_MAX, 414)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
        if len(self.headers) > HEADERS_MAX:
            self._refusal = 431, f"a request may have at most {HEADERS_MAX} headers"
            raise _Refused

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= PIPELINE_MAX:
            self._refusal = 503, f"at most {PIPELINE_MAX} requests may wait on one connection"
            raise _Refused
        parser, before = self.parser, self.exchange
        self._upgrades = parser.should_upgrade() and self._should_upgrade()
        if self._upgrades and before is not None and not before.response_complete:
            self._refusal = 400, "wait for the answer before you ask for a websocket"
            raise _Refused
        self._refuse_doubt()
        self.method = parser.get_method().decode("ascii")
        if not self._upgrades:
            self._begin(before)
        self._began = self.loop.time()
        self._arm(BODY_S, self._look_at_body)

    def _begin(self, before: Exchange | None) -> None:
        url, version = httptools.parse_url(self.url), self.parser.get_http_version()
        path = url.path.decode("ascii")
        scope = {
            "type": "http",
            "http_version": version,
            "method": self.method,
            "scheme": self.scheme,
            "path": unquote(path) if "%" in path else path,
            "query_string": url.query or b"",
            "headers": self.headers,
            "client": self.client,
            "server": self.server,
            PROVEN: self._prove,
        }
        exchange = self.cycle = self.exchange = Exchange(  # type: ignore[assignment]
            scope,
            self.transport,
            self.flow,
            self.on_response_complete,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            expects_continue=(b"expect", b"100-continue") in self.headers,
        )
        if before is None or before.response_complete:
            self._start_asgi_task(exchange, self.app)  # type: ignore[arg-type]
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        if self._upgrades or self.exchange is None:
            return
        self._silent = 0
        self._received += len(body)
        if self.exchange.response_complete:
            self._linger(len(body))
        else:
            self.exchange.add(body)

    def on_message_complete(self) -> None:
        self._silent = 0
        self._whole = True
        self._disarm()
        if self._upgrades or self.exchange is None:
            return
        if not self.exchange.response_complete:
            self.exchange.end()
        elif not self.transport.is_closing():
            self._await_next()

    def on_response_complete(self) -> None:
        """As uvicorn's, but with the timer that is there."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._whole:
            self._await_next()
        if not self._whole:
            self._lingering = LINGER_BYTES
            self._arm(LINGER_S, self.transport.abort)

    # -- websockets ----------------------------------------------------------------------------

    def _upgrade(self) -> None:
        """The connection goes on as a websocket, and counts as one connection as before."""
        from shoal.api.upgraded import Upgraded  # many heads never see one

        self._disarm()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        next_ = Upgraded(self.config, self.server_state, self.app_state)
        next_.begin({PROVEN: self._prove}, lambda: self.gate.leave(self))
        next_.connection_made(self.transport)
        self.transport.set_protocol(next_)
        next_.data_received(request_head(self.method, self.url, self.headers))
        if not next_.begun and not self.transport.is_closing():
            self._refuse(400, "this is not a request for a websocket")

    def _refuse_doubt(self) -> None:
        """Two of these, or an address with another host in it, would mean one thing to us and
        another to whoever passed the request on."""
        names = [name for name, _ in self.headers if name in SOLE]
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            self._refusal = 400, f"the header {name.decode()} may be sent only once"
            raise _Refused
        if not self.url.startswith((b"/", b"*")):
            self._refusal = 400, "this is not a proxy: the address must begin with a slash"
            raise _Refused

    # -- bounds --------------------------------------------------------------------------------

    def _prove(self, owner: str) -> bool:
        return self.gate.prove(self, owner)

    def _await_next(self) -> None:
        self._arm(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self._rests = True

    def _unset_keepalive_if_required(self) -> None:
        if self._rests:
            self._disarm()

    def _look_at_body(self) -> None:
        """The sender's time stops while we do not read, for example because the disk is slow."""
        now = self.loop.time()
        if self.flow.read_paused:
            self._began, self._received = now, 0
        left_s = self._began + BODY_S + self._received / BODY_BYTES_PER_S - now
        if left_s > 0:
            self._arm(left_s, self._look_at_body)
        else:
            self._late()

    def _late(self) -> None:
        self._refuse(408, "the request took too long to arrive")

    def _too_large(self, what: str, most: int, status: int = 431) -> None:
        self._refusal = status, f"the {what} of a request may have at most {most // 1024} KiB"
        raise _Refused

    def _refuse(self, status: int, message: str) -> None:
        """Answer in one line and close. Data still arriving is discarded for a moment: if we closed
        at once, the kernel would reset the connection and the client would lose the answer."""
        if self.transport.is_closing():
            return
        self._closing = True
        self._unset_keepalive_if_required()
        exchange = self.exchange
        answered = exchange is None or exchange.response_complete
        if exchange is not None and exchange.response_started and not answered:
            self.transport.abort()
            return
        body = msgspec.json.encode(Problem(message=message))
        later = [(b"retry-after", b"1")] if status == 503 else []
        self.transport.write(last_answer(status, body, later))
        self.gate.leave(self)
        if exchange is not None and not answered:
            exchange.disconnected = True  # its handler must not answer as well
            exchange.message_event.set()
        if status == 503:  # no room to keep it open
            self.transport.close()
            return
        if self.transport.can_write_eof():  # TLS cannot
            self.transport.write_eof()
        self._lingering = LINGER_BYTES
        self._arm(LINGER_S, self.transport.abort)

    def _linger(self, count: int) -> None:
        self._lingering -= count
        if self._lingering < 0:
            self.transport.abort()

    def _arm(self, seconds: float, act: Callable[[], None]) -> None:
        """Three times for each request, of which none is over but for those that are late. So there
        is one timer, which looks for what is due, and is set again only if that is earlier."""
        self._act, self._due, self._rests = act, self.loop.time() + seconds, False
        if self._timer is None or self._due < self._timer_due:
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = self._due
        self._timer = self.loop.call_at(self._due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._act is None:
            return
        if self._due > self.loop.time():
            self._start_timer()
        else:
            act = self._act
            self._disarm()
            act()

    def _disarm(self) -> None:
        self._act, self._rests = None, False


class _Refused(Exception):
    """Stops the parser; `_refusal` says why."""


def guarded(gate: Gate) -> type[Guard]:
    return type("Guarded", (Guard,), {"gate": gate})
