"""The application: finds the handler of a request, lets it in, gives it what it asks for, and sends
its answer. Everything that holds for all calls is here: access, quota, audit, problems."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from shoal.api.audit import HANDLER, PATH_PARAMS
from shoal.api.handling import Asked, Handler, Params
from shoal.api.http import (
    Closed,
    Connection,
    Receive,
    Request,
    Response,
    Scope,
    Send,
    Socket,
    State,
    encode,
    plain_start,
)
from shoal.api.principal import SCOPE, Principal
from shoal.api.problems import Refusal, answer_to, invalid
from shoal.api.quotas import ENTRY, TICKET, Ticket
from shoal.api.watcher import ENDED, REFUSED, Entry
from shoal.calls.call import WEBSOCKET, Call
from shoal.calls.table import methods_at
from shoal.control.loop import Unreadable
from shoal.model.views import Problem

OWN = frozenset({"self", "request", "socket", "data"})
# These are given last, with no `await` behind: handlers start from the stored state.
SETTLED = frozenset({"loop", "reach", "feed"})
SCHEMA_TYPE = "application/vnd.oai.openapi+json"
READS_MAX = 3  # of one request that only reads, if steps begin in the middle of it
FAILED = 4500  # the code with which a websocket is closed that nobody answers

Provide = Callable[[Connection], Any]
Routes = Iterable[type | Handler]


class Guard(Protocol):
    async def guard(self, connection: Connection, handler: Handler) -> None: ...


class Audit(Guard, Protocol):
    async def answered(self, scope: Scope, status: int) -> None: ...


def handlers_of(routes: Routes) -> list[Handler]:
    found: list[Handler] = []
    for route in routes:
        values = [route] if isinstance(route, Handler) else vars(route).values()
        found += [value for value in values if isinstance(value, Handler)]
    return found


async def _at_once() -> None: ...


class App:
    """An ASGI application. `provided`: what handlers ask for by the names of their parameters."""

    def __init__(
        self,
        routes: Routes,
        access: Guard,
        provided: Mapping[str, Provide],
        *,
        audit: Audit | None = None,
        check: Callable[[], None] = lambda: None,
        settled: Callable[[], Awaitable[None]] = _at_once,
        ahead: Callable[[Connection], Awaitable[None] | None] = lambda _: None,
        state: State | None = None,
    ) -> None:
        """`check` is called before anything is answered, and `ahead` before handlers that need the
        state settled: what it reads, they need not read on the event loop."""
        self.state = State() if state is None else state
        self.handlers = handlers_of(routes)
        self.provided = {**provided, "who": _who}
        self._of = {handler.call: handler for handler in self.handlers}
        self._guards = [access, *([audit] if audit is not None else [])]
        self._audit, self._check, self._settled, self._ahead = audit, check, settled, ahead
        self._plans: dict[Handler, _Plan] = {}
        self._schema = Handler(None, self._described, media_type=SCHEMA_TYPE)
        self._options = Handler(None, _options)

    def plan(self, handler: Handler) -> _Plan:
        found = self._plans.get(handler)
        if found is None:
            found = self._plans[handler] = _Plan(handler, self.provided)
        return found

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        ticket, entry = Ticket(), Entry()
        scope[TICKET], scope[ENTRY] = ticket, entry

        async def sent(message: Any) -> None:
            kind = message["type"]
            self._check()
            if kind == "http.response.start":
                entry.started = True
                if self._audit is not None:
                    await self._audit.answered(scope, message["status"])
            elif kind == "http.response.body":
                if message["more_body"] and not entry.stream:
                    entry.becomes_stream()
            elif kind == "websocket.accept" and self._audit is not None:
                await self._audit.answered(scope, 101)
            await send(message)

        try:
            if scope["type"] == "http":
                await self._http(scope, receive, sent, entry)
            elif scope["type"] == "websocket":
                await self._websocket(Socket(scope, receive, sent))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not entry.void or task is None:
                raise
            task.uncancel()
            with contextlib.suppress(Exception):  # it may be gone already
                await _say_so(entry, scope, sent)
        finally:
            entry.leave()
            ticket.close()

    # -- requests ------------------------------------------------------------------------------

    async def _http(self, scope: Scope, receive: Receive, send: Send, entry: Entry) -> None:
        async def received() -> Any:
            message = await receive()
            if entry.void and message["type"] == "http.request":
                raise Refusal(401, ENDED)  # a body that was still on its way
            return message

        request = Request(scope, received)
        request.app = self
        try:
            handler = self._found(request, scope["method"])
            for guard in self._guards:
                await guard.guard(request, handler)
            content = await self._content(request, handler)
            if isinstance(content, Response):
                await content.answer(handler.status, handler.media_type, receive, send)
                return
            if isinstance(content, str):
                await Response(content).answer(handler.status, handler.media_type, receive, send)
                return
            status, body, more = handler.status, encode(content), []
        except Exception as error:
            if entry.started:
                raise
            status, problem, retry_s = answer_to(error, f"{request.method} {request.path}")
            more = [(b"retry-after", b"%d" % retry_s)] if retry_s else []
            body = encode(problem)
        start = plain_start(status, len(body))
        start["headers"] += more
        await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _content(self, request: Request, handler: Handler) -> Any:
        """A step may have begun since the handler was given its arguments. One that only reads then
        begins again, when the step is stored."""
        for _ in range(READS_MAX if request.method == "GET" else 1):
            given = await self._given(request, handler)
            try:
                return await handler.fn(**given) if handler.awaits else handler.fn(**given)
            except Unreadable as error:
                unreadable = error
        raise unreadable

    def _found(self, connection: Connection, method: str) -> Handler:
        """A request whose route is not known is not written into the audit log."""
        calls, segments = _calls_at(connection.path)
        path: dict[str, str] = {}
        if method in calls:
            call = calls[method]
            path = {n: s for (_, n), s in zip(call.parts, segments, strict=True) if n}
            handler = self._of.get(call)
        elif method == "GET" and segments in (["schema"], ["schema", "openapi.json"]):
            handler = self._schema
        elif not calls:
            handler = None
        elif method == "OPTIONS" and WEBSOCKET not in calls:
            handler, path = self._options, {"": ", ".join(sorted((*calls, "OPTIONS")))}
        elif method == WEBSOCKET:
            handler = None
        else:
            raise Refusal(405, "Method Not Allowed")
        if handler is None:
            raise Refusal(404, "Not Found")
        connection.path_params = path
        connection.scope[HANDLER], connection.scope[PATH_PARAMS] = handler, path
        return handler

    async def _given(self, connection: Connection, handler: Handler) -> dict[str, Any]:
        """What the handler asks for. The state is settled when this returns, if it needs that."""
        plan = self.plan(handler)
        given: dict[str, Any] = {}
        if plan.decoder is not None:
            assert isinstance(connection, Request)
            connection.body_max = handler.body_max
            given["data"] = _decoded(plan.decoder, await connection.body())
        elif isinstance(connection, Request):
            connection.body_max = handler.body_max
        for name, provide in plan.early:
            given[name] = provide(connection)
        if plan.params is not None:
            given |= plan.params.read(connection, connection.path_params)
        if plan.own == "state":
            given["state"] = self.state
        elif plan.own:
            given[plan.own] = connection
        if plan.owner is not None:
            given["self"] = plan.owner
        if plan.late:
            if (reading := self._ahead(connection)) is not None:
                await reading
            await self._settled()
            for name, provide in plan.late:
                given[name] = provide(connection)
        return given

    def _described(self) -> Response[bytes]:
        from shoal.api.schema import described

        return Response(described(self))

    # -- websockets ----------------------------------------------------------------------------

    async def _websocket(self, socket: Socket) -> None:
        socket.app = self
        try:
            handler = self._found(socket, WEBSOCKET)
            for guard in self._guards:
                await guard.guard(socket, handler)
            await handler.fn(**await self._given(socket, handler))
        except Closed as error:
            await socket.close(error.code, str(error))
        except Exception as error:
            problem = answer_to(error, f"a websocket at {socket.path}").problem
            await socket.close(FAILED, problem.message)


class _Plan:
    """How a handler gets its arguments."""

    def __init__(self, handler: Handler, provided: Mapping[str, Provide]) -> None:
        names = handler.fn.__code__.co_varnames[: _count(handler.fn)]
        self.decoder = handler.decoder
        self.owner = handler.owner() if handler.owner is not None else None
        hints = handler.hints
        own = [name for name in names if name in ("request", "socket") or hints.get(name) is State]
        self.own = own[0] if own else ""
        wanted = [name for name in names if name in provided]
        self.early = [(name, provided[name]) for name in wanted if name not in SETTLED]
        self.late = [(name, provided[name]) for name in wanted if name in SETTLED]
        params = handler.params(frozenset({*OWN, *wanted}))
        self.params = params if params.types else None

    def all_params(self) -> list[Params]:
        """Also those of what it asks for."""
        asked = [provide.params for _, provide in self.early if isinstance(provide, Asked)]
        return [*([self.params] if self.params is not None else []), *asked]


def _count(fn: Callable[..., Any]) -> int:
    code = fn.__code__
    return code.co_argcount + code.co_kwonlyargcount


def _calls_at(path: str) -> tuple[dict[str, Call], list[str]]:
    """The calls of a path by their methods. Slashes that say nothing are passed over."""
    segments = path.split("/")[1:]
    calls = methods_at(segments)
    if calls is None:
        segments = [segment for segment in segments if segment] or [""]
        calls = methods_at(segments)
    return calls or {}, segments


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    if not body:
        raise Refusal(400, "the request has no body", "data")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(error, "data") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(400, str(error)) from None


def _who(connection: Connection) -> Principal:
    found: Principal = connection.scope[SCOPE]
    return found


def _options(request: Request) -> Response[None]:
    return Response(None, status=204, headers={"allow": request.path_params[""]})


async def _say_so(entry: Entry, scope: Scope, send: Send) -> None:
    """What it showed is void by now."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": REFUSED, "reason": ENDED})
        return
    body = b""
    if not entry.started:
        body = encode(Problem(message=ENDED))
        await send(plain_start(401, len(body)))
    await send({"type": "http.response.body", "body": body, "more_body": False})
