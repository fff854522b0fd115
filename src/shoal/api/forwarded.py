"""What every head does with requests and answers, whether it leads or not (ADR 56).

Answers carry the number of the newest event that they may show. A request that another head has
forwarded carries a signed header with what the leader cannot see itself: where the caller is.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shoal.api.http import SAFE_HEADERS, ASGIApp, Message, Receive, Scope, Send
from shoal.api.limits import PROVEN
from shoal.api.problems import Refusal
from shoal.api.routing import App
from shoal.client import reaching
from shoal.model.service import GatewayEntry

FORWARDED = "shoal.forwarded"  # in a request's scope: what the head that forwarded it says
HEADER = b"shoal-forwarded"
# In the app's state: what a server serves, who may do what, and (a function) the URLs of all heads.
SERVED, ACCESS, HEAD_URLS = "served", "access", "head_urls"
SEQ, HEADS, STANDBY = (name.encode() for name in (reaching.SEQ, reaching.HEADS, reaching.STANDBY))
RETRY_S = 1
UNKNOWN = "the head that leads ended before it answered; whether it did this is not known"


Headers = Sequence[tuple[bytes, bytes]]


class Elsewhere(Refusal):
    """A standby's, which does not know whether the leader has done this (502), or has not sent it
    to one."""

    def __init__(self, status: int, message: str) -> None:
        self.standby = b"outcome unknown" if status == 502 else b"no leader"
        super().__init__(status, message, retry_s=0 if status == 502 else RETRY_S)


class Forwarded(msgspec.Struct, frozen=True, kw_only=True):
    """`client`: the caller's address, empty for the socket file. `entry`: the caller's gateway."""

    client: str = ""
    scheme: str = "http"
    hops: int = 1
    entry: GatewayEntry | None = None

    def signed(self, token: str) -> bytes:
        body = base64.urlsafe_b64encode(msgspec.json.encode(self))
        return body + b"." + _signature(token, body)


def read(header: bytes, token: str) -> Forwarded | None:
    """None if no head of this cluster has signed it."""
    body, _, signature = header.partition(b".")
    if not hmac.compare_digest(signature, _signature(token, body)):
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(body), type=Forwarded)
    except (ValueError, msgspec.DecodeError):
        return None


def header(scope: Any, name: bytes) -> bytes:
    for known, value in scope["headers"]:
        if known == name:
            return bytes(value)
    return b""


def entry_for(scope: Any) -> GatewayEntry | None:
    """The gateway of the head that the sender asked, if that is another one."""
    said: Forwarded | None = scope.get(FORWARDED)
    return said.entry if said is not None else None


def headed(
    app: App,
    token: str,
    last_seq: Callable[[], int],
    inner: ASGIApp | None = None,
    close: Callable[[], None] = lambda: None,
) -> Headed:
    """What is served for this app, or for `inner`, which uses it."""
    return Headed(inner or app, token, last_seq, lambda: head_urls(app), close)


def head_urls(app: App) -> tuple[str, ...]:
    """None if there is one head alone."""
    known: tuple[str, ...] = app.state[HEAD_URLS]() if HEAD_URLS in app.state else ()
    return known if len(known) > 1 else ()


class Headed:
    """Wraps what serves a head's requests. `urls`: all heads, or none if there is one alone."""

    def __init__(
        self,
        app: ASGIApp,
        token: str,
        last_seq: Callable[[], int],
        urls: Callable[[], tuple[str, ...]] = lambda: (),
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`close`: when the server ends."""
        self.close = close
        self._app = app
        self._token = token
        self._last_seq = last_seq
        self._urls = urls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """No request goes without an answer of ours, whatever ends it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = header(scope, HEADER)
        said = read(given, self._token) if given else None
        if said is not None:
            _as_it_was(scope, said)

        started = False

        async def numbered(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                self._number(message)
            await send(message)

        try:
            await self._app(scope, receive, numbered)
        except asyncio.CancelledError:  # the server ends, and has waited for as long as it will
            if started or scope["type"] == "websocket":
                raise
            await answer(numbered, Elsewhere(502, UNKNOWN))

    def _number(self, message: Any) -> None:
        headers = list(message.get("headers", ()))
        if not any(name == SEQ for name, _ in headers):  # the leader's own is right
            headers.append((SEQ, str(self._last_seq()).encode()))
            urls = self._urls()
            if urls:
                headers.append((HEADS, ",".join(urls).encode()))
        message["headers"] = headers


async def answer(send: Send, error: Refusal, prefix: str = "", more: Headers = ()) -> None:
    """Without the app. `prefix`: of the messages' types, for websockets."""
    body = msgspec.json.encode(error.problem)
    headers = [(name.encode(), value.encode()) for name, value in SAFE_HEADERS.items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(b"retry-after", b"%d" % error.retry_s)] if error.retry_s else []
    headers += [(STANDBY, error.standby)] if isinstance(error, Elsewhere) else []
    start: Any = {"type": f"{prefix}http.response.start", "status": error.status}
    start["headers"] = [*headers, *more]
    end: Any = {"type": f"{prefix}http.response.body", "body": body, "more_body": False}
    await send(start)
    await send(end)


def _as_it_was(scope: Any, said: Forwarded) -> None:
    """As if the caller had come to us, except that the connection is one of the heads' own."""
    scope[FORWARDED] = said
    scope["client"] = (said.client, 0) if said.client else None
    if scope["type"] == "http":
        scope["scheme"] = said.scheme
    proven: Any = scope.get(PROVEN)
    if proven is not None:
        proven("")
        scope[PROVEN] = lambda _: True  # the other head has counted it for its tenant


def _signature(token: str, body: bytes) -> bytes:
    key = hashlib.sha256(f"shoal-forwarded\n{token}".encode()).digest()
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode()
