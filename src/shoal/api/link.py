"""The route that agents on other machines dial: one websocket for each node."""

from __future__ import annotations

from typing import Any

from litestar import Controller, WebSocket
from litestar.exceptions import WebSocketException

from shoal.api.audit import QUIET
from shoal.api.handling import handles
from shoal.api.principal import SCOPE, Principal
from shoal.api.tickets import TICKET
from shoal.api.upgraded import LINE, Upgraded
from shoal.api.watcher import REFUSED
from shoal.calls.page import MachineCalls
from shoal.engines.linked.engine import LinkedEngine

AnySocket = WebSocket[Any, Any, Any]


class NodeLink(Controller):
    @handles(MachineCalls.link)
    async def link(self, socket: AnySocket, linked: LinkedEngine | None) -> None:
        """Messages go straight to the engine. What is left here is the end of the connection."""
        who: Principal = socket.scope[SCOPE]  # type: ignore[literal-required]
        line: Any = socket.scope.get(LINE)
        if linked is None or not who.node or not isinstance(line, Upgraded):
            detail = "this is a join token; a link needs the key of a node: shoal join"
            raise WebSocketException(detail=detail, code=REFUSED)
        ticket: Any = socket.scope.get(TICKET)
        if ticket is not None:
            ticket.close()  # a link lasts for as long as its node: it is not a request under way
        # A thousand links that come back are not a thousand deeds: the join was one.
        socket.scope[QUIET] = True  # type: ignore[literal-required]
        await socket.accept()
        line.hand_over(linked.accept(who.node))
        while (await socket.receive())["type"] != "websocket.disconnect":
            pass
