"""How a handler says which call it answers: path, method, status and access come from the call;
and the threads in which it reads the past."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from litestar import MediaType, Response
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler, WebsocketRouteHandler

from shoal.calls.call import WEBSOCKET, Call, declared

CALL = "call"  # in a route's `opt`
SCHEMA = "/schema"


def handles(
    method: Callable[..., Any], **options: Any
) -> Callable[[Callable[..., Any]], BaseRouteHandler]:
    """`method` is a call as the client declares it; `options` are Litestar's."""
    call = declared(method)
    path = re.sub(r"\{(\w+)\}", r"{\1:str}", call.path)

    def register(function: Callable[..., Any]) -> BaseRouteHandler:
        if call.method == WEBSOCKET:
            return WebsocketRouteHandler(path, opt={CALL: call}, **options)(function)
        if not asyncio.iscoroutinefunction(function):
            options["sync_to_thread"] = False
        return HTTPRouteHandler(
            path,
            http_method=call.method,  # type: ignore[arg-type]
            status_code=call.status,
            description=call.text,
            opt={CALL: call},
            **options,
        )(function)

    return register


def is_schema(path: str) -> bool:
    """The document that describes the calls, which is the framework's own."""
    return path == SCHEMA or path.startswith(f"{SCHEMA}/")


def call_of(handler: BaseRouteHandler) -> Call | None:
    """None: the route is the framework's own."""
    found: Call | None = handler.opt.get(CALL)
    return found


# Threads that read the past, so that the loop never waits for a long list: one reads long lists
# and encodes them as JSON, one after the other; short answers have their own threads. The loop only
# sends the bytes.


Result = TypeVar("Result")

LONG_ROWS = 500  # a longer list counts as long
ROWS_AT_ONCE = 100  # live jobs per piece; then the loop gets a turn

_short = ThreadPoolExecutor(max_workers=2, thread_name_prefix="reading")
_long = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reading-long")
_encode = msgspec.json.Encoder().encode


async def aside(work: Callable[[], Result], rows: int = 0) -> Result:
    """The work must not touch what belongs to the loop, above all the state."""
    pool = _long if rows > LONG_ROWS else _short
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def json_list(parts: list[bytes]) -> bytes:
    return b"[" + b",".join(part[1:-1] for part in parts if len(part) > len(b"[]")) + b"]"


def respond(body: bytes, headers: dict[str, str] | None = None) -> Response[Any]:
    return Response(body, media_type=MediaType.JSON, headers=headers)


def encoded(value: object) -> bytes:
    return _encode(value)
