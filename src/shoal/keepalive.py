"""Lets the kernel notice a peer whose machine vanished, after about 30 seconds."""

from __future__ import annotations

import socket

IDLE_S = 10
PAUSE_S = 5
TRIES = 4


def keep_alive(connection: socket.socket) -> None:
    """The options differ between systems; whichever one has is set."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence_ms = 1000 * (IDLE_S + PAUSE_S * TRIES)
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", PAUSE_S),
        ("TCP_KEEPCNT", TRIES),
        ("TCP_USER_TIMEOUT", silence_ms),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
