"""A connection that became a websocket: uvicorn's protocol, with bounds. Loaded with the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from shoal.link.channel import Channel
from shoal.link.meeting import MESSAGE_BYTES_MAX
from shoal.link.wire import Link

LINE = "shoal.line"  # in a request's scope: the connection itself, for a route that takes it over


class Upgraded(WebSocketsSansIOProtocol):
    """Whatever is in `known` is in its requests' scope. The kernel notices a peer that vanished:
    websocket pings cannot, because a reader that is held back does not read the answers."""

    _known: dict[str, Any]
    _left: Callable[[], None]
    _link: Link | None = None

    def begin(self, known: dict[str, Any], left: Callable[[], None]) -> None:
        self._known, self._left = known, left
        self.ping_interval = None
        self.conn.max_message_size = MESSAGE_BYTES_MAX

    @property
    def begun(self) -> bool:
        """Whether the application got the request, rather than that it was refused."""
        return hasattr(self, "scope")

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.begun:
            self.scope.update({**self._known, LINE: self})  # type: ignore[typeddict-item]

    def hand_over(self, link: Link) -> None:
        """From now on every message goes straight to this link, below the application. Links have a
        bound of their own, one for each node's key, so it no longer counts as a connection."""
        self._left()
        self._link = link
        self.conn.max_message_size = MESSAGE_BYTES_MAX
        link.connection_made(Channel(self.conn, self.transport))

    def send_receive_event_to_app(self) -> None:
        if self._link is None:
            super().send_receive_event_to_app()
            return
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames = []
        if not self.transport.is_closing():
            self._link.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._left()
        if self._link is not None:
            self._link.connection_lost(exc)
        super().connection_lost(exc)
