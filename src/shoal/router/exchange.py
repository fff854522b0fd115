"""A request from its first byte to its last: which service it is for, and whether the router must
understand it or only copies it."""

from __future__ import annotations

import time
from math import ceil
from typing import Any

import msgspec

from shoal.router import engines
from shoal.router.front import Front, Gone, Request
from shoal.router.openai import MODELS, SHARED, UNREADABLE, Ask, Wrong, encode
from shoal.router.serve import Serving, Wishes, place
from shoal.router.wire import (
    OURS,
    Headers,
    Line,
    Lost,
    for_a_replica,
    join,
    request_head,
)
from shoal.router.world import Replica, Service, Turn, World

BODY_BYTES_MAX = 256 << 20
BODIES_BYTES_MAX = 1 << 30  # of all requests at a time, because they may be sent again
COPY_TRIES_MAX = 4
JSON: Headers = [(b"content-type", b"application/json")]
SPENT_S, SPENT_MAX_S = 60, 86_400  # before a key that has used up its tokens should ask again
SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS"))


class Listed(msgspec.Struct):
    data: list[dict[str, Any]]


class Router:
    def __init__(self, world: World) -> None:
        self._world = world
        self._held = 0  # bytes of bodies

    async def handle(self, front: Front, request: Request) -> None:
        try:
            await self._route(front, request)
        except Wrong as wrong:
            headers = list(JSON)
            if wrong.retry_after_s:
                headers.append((b"retry-after", b"%d" % wrong.retry_after_s))
            await front.answer(request, wrong.status, headers, wrong.body)

    async def _route(self, front: Front, request: Request) -> None:
        name = request.header(b"x-shoal-service").decode("latin-1")
        caller = request.header(b"x-shoal-caller").decode("latin-1")
        until_ms = self._world.refused.get(caller)
        if until_ms is not None:
            why, after_s = "this key has used up its tokens", _left_s(until_ms, time.time())
            raise Wrong(429, why, "insufficient_quota", after_s)
        if caller in self._world.limited and not is_counted(request):
            why = "a key with a limit of tokens is for OpenAI's routes, which count them"
            raise Wrong(403, why, "permission_denied")
        shared = name == "*"
        service = self._world.services.get(name)
        model = request.path.removeprefix(MODELS + b"/") if shared else request.path
        is_list = request.path == MODELS or model != request.path
        if shared and request.path not in SHARED and not is_list:
            raise Wrong(404, "the shared address has only OpenAI's routes", "not_found")
        if service is None and not shared:
            raise Wrong(404, f"there is no service {name[:63]!r}", "service_not_found")
        # A caller may not make an engine read files.
        if service and service.wanted.adapters and b"lora" in request.path:
            raise Wrong(403, "adapters of this service are loaded by demand", "forbidden")
        if request.path in SHARED:  # the engine shall read what we have read
            request.target = request.path + b"".join(request.target.partition(b"?")[1:])
        if is_text(request) and request.header(b"content-encoding"):
            raise Wrong(415, "send the body without a Content-Encoding", "unsupported_encoding")
        if is_list and request.method == b"GET":
            await self._models(front, request, service)
        elif is_json(request):
            await self._ask(front, request, service)
        elif service is None:
            raise Wrong(400, "send a JSON body whose model names a service", "invalid_json")
        else:
            await self._copy(front, request, service)

    # -- OpenAI's routes

    def _allowed(self, request: Request) -> list[Service]:
        """What this caller may use at the shared address."""
        caller = request.header(b"x-shoal-caller").decode("latin-1")
        return [
            one
            for one in self._world.services.values()
            if one.wanted.callers is None or caller in one.wanted.callers
        ]

    async def _models(self, front: Front, request: Request, service: Service | None) -> None:
        listed: list[dict[str, Any]] = []
        if request.path != MODELS:
            return await self._model(front, request)
        if service is None:
            for one in self._allowed(request):
                name = one.wanted.name
                listed += [_model(name)]
                listed += [_model(f"{name}/{each}", name) for each in one.wanted.adapters]
        else:
            listed = await _listed(request, service)
            known = [one.get("id") for one in listed]
            more = [each for each in service.wanted.adapters if each not in known]
            listed += [_model(each, service.wanted.name) for each in more]
        return await front.answer(request, 200, JSON, encode({"object": "list", "data": listed}))

    async def _model(self, front: Front, request: Request) -> None:
        name = request.path.removeprefix(MODELS + b"/").decode("latin-1")
        service, adapter = self._choose(request, name)
        found = _model(name, service.wanted.name if adapter else None)
        await front.answer(request, 200, JSON, encode(found))

    def _choose(self, request: Request, model: str) -> tuple[Service, str]:
        """The service and the adapter that a model at the shared address means."""
        allowed = {one.wanted.name: one for one in self._allowed(request)}
        name, _, adapter = model.partition("/")
        if name in allowed and (not adapter or adapter in allowed[name].wanted.adapters):
            return allowed[name], adapter
        if len(allowed) < len(self._world.services) and not request.header(b"x-shoal-caller"):
            why = "without a key, or with one that is unknown, revoked or expired"
            raise Wrong(401, f"there is no model {model[:63]!r} {why}", "invalid_api_key")
        raise Wrong(404, f"there is no model {model[:63]!r}; see /v1/models", "model_not_found")

    async def _ask(self, front: Front, request: Request, service: Service | None) -> None:
        services = [service] if service else list(self._world.services.values())
        most = max((one.wanted.body_bytes_max or BODY_BYTES_MAX for one in services), default=0)
        body = await self._body(front, request, min(most, BODY_BYTES_MAX))
        try:
            ask = Ask(request.path, body)
            adapter = ""
            if service is None:
                service, adapter = self._choose(request, ask.model)
                if 0 < service.wanted.body_bytes_max < len(body):
                    raise too_large(service.wanted.body_bytes_max)
                ask.model = ""
            else:
                bare = ask.model.removeprefix(f"{service.wanted.name}/")
                adapter = bare if bare in service.wanted.adapters else ""
            await Serving(front, request, service, ask, adapter).run()
        finally:
            self._held -= len(body)

    async def _body(self, front: Front, request: Request, most: int) -> bytes:
        """Its bytes count until the request is done."""
        if (request.length or 0) > most:
            raise too_large(most)
        front.go_on(request)
        parts, size = [], 0
        try:
            while data := await request.inbox.read(front):
                parts.append(data)
                size += len(data)
                self._held += len(data)
                if size > most:
                    raise too_large(most)
                if self._held > BODIES_BYTES_MAX:
                    why = "the router holds as many bytes of requests as it may"
                    raise Wrong(503, why, "overloaded", 1)
        except BaseException:
            self._held -= size
            raise
        return b"".join(parts)

    # -- everything else

    async def _copy(self, front: Front, request: Request, service: Service) -> None:
        """Bytes in both directions. Sent again only if no replica can have seen it, or if it does
        not change anything and has no body."""
        upgrade = request.header(b"upgrade").lower() if request.upgrade else b""
        if request.upgrade and upgrade != b"websocket":
            raise Wrong(501, "the router upgrades to websocket only", "not_implemented")
        wishes, failed = Wishes(request), set[str]()
        again = request.method in SAFE and request.length == 0
        for _ in range(COPY_TRIES_MAX):
            turn = Turn((), 0)
            turn.not_at = failed
            replica = await place(service, turn, wishes, request.began, len(failed))
            try:
                line = await replica.pool.take(service.wanted.connect_timeout_ms / 1e3, not again)
                try:
                    await self._exchange(front, request, service, replica, line)
                finally:
                    if line.raw is None:
                        replica.pool.put(line)
                    else:
                        await replica.pool.tunnel(line)
                return replica.well()
            except Lost as lost:
                replica.fail(time.monotonic())
                if front.began:
                    raise Gone from None  # the client sees that the answer is not whole
                why = str(lost)
                if lost.sent and not again:
                    break
            finally:
                service.leave(turn, worked=True)
            failed.add(replica.id)
        raise Wrong(502, f"no replica could answer: {why}", "bad_gateway")

    async def _exchange(
        self, front: Front, request: Request, service: Service, replica: Replica, line: Line
    ) -> None:
        headers, most = for_a_replica(request.headers), service.wanted.body_bytes_max
        if most and (request.length or 0) > most:
            raise too_large(most)
        if request.upgrade:
            headers += [(b"connection", b"upgrade"), (b"upgrade", b"websocket")]
        line.begin(request_head(request.method, request.target, headers, request.length))
        front.go_on(request)
        size = 0
        while not request.upgrade and (data := await request.inbox.read(front)):
            size += len(data)
            if most and size > most:
                raise too_large(most)
            line.write(data, chunked=request.length is None)
            await line.drain()
        if request.length is None and not request.upgrade:
            line.transport.write(b"0\r\n\r\n")
        status = await line.head()
        shown = [one for one in line.headers if not one[0].startswith(OURS)]
        shown.append((b"x-shoal-replica", replica.id.encode()))
        if status == 101:
            front.switch(shown)
            line.transport.write(front.rest)
            join(front, line)
            for data in line.inbox.chunks:
                front.transport.write(data)
            return
        bare = request.method == b"HEAD" or status in (204, 304)
        length = _length(line.headers)
        front.begin(request, status, shown, (length or 0) if bare else length, bare and not length)
        while not bare and (data := await line.read()):
            await front.write(data)
        front.end()


async def _listed(request: Request, service: Service) -> list[dict[str, Any]]:
    """The models that a replica lists; if it fails, another one is asked."""
    wishes, failed = Wishes(request), set[str]()
    for tried in range(COPY_TRIES_MAX):
        turn = Turn((), 0)
        turn.not_at = failed
        replica = await place(service, turn, wishes, request.began, tried)
        try:
            status, answer = await engines.ask(service, replica, MODELS)
            return msgspec.json.decode(answer, type=Listed).data if status == 200 else []
        except Lost:
            replica.fail(time.monotonic())
        except UNREADABLE:
            pass  # it answers, but lists nothing
        finally:
            service.leave(turn, worked=True)
        failed.add(replica.id)
    raise Wrong(502, "no replica listed its models", "bad_gateway")


def is_json(request: Request) -> bool:
    """A body that the router has to understand. Some engines do not look at its type."""
    kind = request.header(b"content-type").partition(b";")[0].strip().lower()
    other = request.path.startswith(b"/v1/") and kind == b"application/json"
    other = other and request.method == b"POST" and not request.header(b"content-encoding")
    return (other and not request.upgrade) or is_text(request)


def is_counted(request: Request) -> bool:
    return is_json(request) or (request.method in SAFE and not request.upgrade)


def is_text(request: Request) -> bool:
    """Whether an engine answers it with tokens, which are counted."""
    return request.method == b"POST" and request.path in SHARED and not request.upgrade


def _left_s(until_ms: int, now: float) -> int:
    """Of a caller's quota, in whole seconds; a later end is bounded, because a quota may grow."""
    return min(max(1, ceil(until_ms / 1e3 - now)), SPENT_MAX_S) if until_ms else SPENT_S


def too_large(most: int) -> Wrong:
    return Wrong(413, f"the body is larger than {most} bytes", "body_too_large")


def _length(headers: Headers) -> int | None:
    found = next((value for name, value in headers if name == b"content-length"), None)
    return int(found) if found is not None else None


def _model(name: str, parent: str | None = None) -> dict[str, Any]:
    more = {"parent": parent} if parent else {}
    return {"id": name, "object": "model", "created": 0, "owned_by": "shoal", **more}
