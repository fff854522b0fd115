"""How a handler says which call it answers: path, method, status and access come from the call."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

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
