"""Requests and answers as handlers see them, on the messages of ASGI."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec

if TYPE_CHECKING:
    from shoal.api.routing import App

Message = dict[str, Any]
Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
ASGIApp = Callable[[Any, Receive, Send], Awaitable[None]]
Content = TypeVar("Content")
HeaderList = list[tuple[bytes, bytes]]

JSON, TEXT = "application/json", "text/plain"
NO_BODY = (204, 304)
TOO_LARGE = "Request Entity Too Large"
# Answers are for their sender alone, and data: a browser must neither keep nor run nor frame them.
SAFE_HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_SAFE_JSON: HeaderList = [
    *((name.encode(), value.encode()) for name, value in SAFE_HEADERS.items()),
    (b"content-type", JSON.encode()),
]

encode = msgspec.json.Encoder().encode


class State(dict[str, Any]):
    """What the parts of one application share, by name."""


class Peer(NamedTuple):
    host: str
    port: int


class Connection:
    """Whoever asks, before anything of a body is read."""

    app: App
    path_params: dict[str, str]

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._headers: dict[str, str] | None = None
        self._query: list[tuple[str, str]] | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Names are in lower case. Of two with one name, the first counts."""
        if self._headers is None:
            given = reversed(self.scope["headers"])
            pairs = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in given)
            self._headers = dict(pairs)
        return self._headers

    @property
    def cookies(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for part in self.headers.get("cookie", "").split(";"):
            name, _, value = part.partition("=")
            found.setdefault(name.strip(), value.strip().strip('"'))
        return found

    @property
    def query(self) -> list[tuple[str, str]]:
        if self._query is None:
            text = self.scope.get("query_string", b"").decode("latin-1")
            self._query = parse_qsl(text, keep_blank_values=True, errors="replace") if text else []
        return self._query

    @property
    def client(self) -> Peer | None:
        """None: through the socket file."""
        peer = self.scope.get("client")
        return Peer(*peer) if peer else None

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def method(self) -> str:
        return str(self.scope.get("method", "GET"))

    @property
    def secure(self) -> bool:
        return self.scope.get("scheme") in ("https", "wss")

    @property
    def base_url(self) -> str:
        host = self.headers.get("host", "")
        return f"{'https' if self.secure else 'http'}://{host}/"


class Large(Exception):
    """The body has more bytes than its call takes."""


class Gone(Exception):
    """The sender has left in the middle of it."""


class Request(Connection):
    """`body_max`: bytes; None: any number, because they are not kept in memory."""

    body_max: int | None = None

    def __init__(self, scope: Scope, receive: Receive) -> None:
        super().__init__(scope)
        self.receive = receive

    async def stream(self) -> AsyncIterator[bytes]:
        most, count = self.body_max, 0
        given = self.headers.get("content-length", "")
        if most is not None and given.isdigit() and int(given) > most:
            raise Large
        more = True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Gone
            body = message.get("body", b"")
            count += len(body)
            if most is not None and count > most:
                raise Large
            if body:
                yield body
            more = message.get("more_body", False)

    async def body(self) -> bytes:
        parts = [part async for part in self.stream()]
        return parts[0] if len(parts) == 1 else b"".join(parts)


class Closed(Exception):
    """Closes a websocket with this code."""

    def __init__(self, detail: str, code: int) -> None:
        super().__init__(detail)
        self.code = code


class Socket(Connection):
    """A websocket. Its messages are those of ASGI."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope)
        self.receive, self.send = receive, send

    async def accept(self) -> None:
        await self.receive()  # websocket.connect
        await self.send({"type": "websocket.accept", "subprotocol": None, "headers": []})

    async def send_text(self, text: str) -> None:
        await self.send({"type": "websocket.send", "bytes": None, "text": text})

    async def close(self, code: int, reason: str = "") -> None:
        await self.send({"type": "websocket.close", "code": code, "reason": reason})


class Cookie(NamedTuple):
    key: str
    value: str
    max_age: int
    path: str
    secure: bool
    samesite: str

    def header(self) -> tuple[bytes, bytes]:
        made: SimpleCookie = SimpleCookie()
        with contextlib.suppress(CookieError):
            made[self.key] = self.value
        about = made[self.key]
        about["max-age"], about["path"], about["samesite"] = self.max_age, self.path, self.samesite
        about["httponly"], about["secure"] = True, self.secure
        return b"set-cookie", made.output(header="").strip().encode("latin-1")


class Response(Generic[Content]):
    """An answer of a handler that says more than its content. Without a status, it is the call's.
    Content that is not bytes becomes JSON, unless it is text of another media type."""

    def __init__(
        self,
        content: Content,
        *,
        status: int = 0,
        media_type: str = "",
        headers: Mapping[str, str] | None = None,
        cookies: Sequence[Cookie] = (),
    ) -> None:
        self.content, self.status, self.media_type = content, status, media_type
        self.headers, self.cookies = headers or {}, cookies

    def start(self, status: int, media_type: str, length: int | None) -> Message:
        headers = {**SAFE_HEADERS, **self.headers}
        if status not in NO_BODY:
            kind = self.media_type or media_type
            headers["content-type"] = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
            if length is not None:
                headers["content-length"] = str(length)
        made = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        made += [cookie.header() for cookie in self.cookies]
        return {"type": "http.response.start", "status": status, "headers": made}

    async def answer(self, status: int, media_type: str, receive: Receive, send: Send) -> None:  # noqa: ARG002
        content: Any = self.content
        if isinstance(content, str) and (self.media_type or media_type) != JSON:
            content = content.encode()
        body = content if isinstance(content, bytes) else encode(content)
        status = self.status or status
        body = b"" if status in NO_BODY else body
        await send(self.start(status, media_type, len(body)))
        await send({"type": "http.response.body", "body": body, "more_body": False})


def plain_start(status: int, length: int) -> Message:
    """The start of an answer that is JSON and nothing else, as most are."""
    headers = [*_SAFE_JSON, (b"content-length", b"%d" % length)]
    return {"type": "http.response.start", "status": status, "headers": headers}


class Redirect(Response[bytes]):
    def __init__(self, where: str, cookies: Sequence[Cookie] = ()) -> None:
        super().__init__(
            b"", status=302, media_type=TEXT, headers={"location": where}, cookies=cookies
        )


class Stream(Response[AsyncGenerator[bytes, None]]):
    """Its content is sent as it comes, until it or its reader ends."""

    async def answer(self, status: int, media_type: str, receive: Receive, send: Send) -> None:
        await send(self.start(self.status or status, media_type, None))
        sending = asyncio.create_task(self._send(send))
        listening = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait((sending, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            both = [one for one in (sending, listening) if not one.done()]
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            await self.content.aclose()
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        async for piece in self.content:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
