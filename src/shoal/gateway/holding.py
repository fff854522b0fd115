"""The ports at which the proxy listens: kept from every other user, even while it is down."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection

from shoal.gateway.binary import GatewayError
from shoal.listening import hold, holder_text

Where = tuple[str, int]  # an address, and a port of it
Take = Callable[[str, Where], None]
GATEWAY = "gateway"


class Holds:
    """`given`: places that the supervisor holds for us."""

    def __init__(self, given: Callable[[Where], bool]) -> None:
        self._given = given
        self._held: dict[Where, socket.socket] = {}

    def __del__(self) -> None:
        """A gateway may be dropped at any moment."""
        for held in self._held.values():
            held.close()

    def take(self, who: str, place: Where, own: Collection[Where]) -> None:
        """GatewayError if somebody else has it. `own`: where our proxy listens already."""
        if place in self._held or self._given(place):
            return
        address, port = place
        try:
            self._held[place] = hold(address, port, shared=place in own)
        except OSError as error:
            other = holder_text(port)
            why = f"{other} has it" if other else error.strerror or str(error)
            advice = "choose another port" if who != GATEWAY else "when it ends, services go on"
            raise GatewayError(
                f"{who}: cannot listen on {address} port {port}: {why}; {advice}"
            ) from None

    def keep(self, places: Collection[Where]) -> None:
        """Those at which our proxy listens now, and no others."""
        for place in self._held.keys() - places:
            self._held.pop(place).close()
        for place in places:
            with contextlib.suppress(GatewayError):
                self.take("", place, places)
