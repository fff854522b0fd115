"""A connection that became a websocket: uvicorn's protocol, with bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from shoal.meeting import MESSAGE_BYTES_MAX


class Upgraded(WebSocketsSansIOProtocol):
    """Whatever is in `known` is in its requests' scope. The kernel notices a peer that vanished:
    websocket pings cannot, because a reader that is held back does not read the answers."""

    _known: dict[str, Any]
    _left: Callable[[], None]

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
            self.scope.update(self._known)  # type: ignore[typeddict-item]

    def connection_lost(self, exc: Exception | None) -> None:
        self._left()
        super().connection_lost(exc)
