"""Lets the kernel notice a peer whose machine vanished: after about 30 seconds, or sooner."""

from __future__ import annotations

import socket

SILENT_S = 30
PARTS = 6  # a look after two parts of the time without a word, and one for each part after that


def keep_alive(connection: socket.socket | None, silent_s: int = SILENT_S) -> None:
    """The options differ between systems; whichever one has is set. None: it has gone."""
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    part_s = max(1, silent_s // PARTS)
    for name, value in (
        ("TCP_NODELAY", 1),
        ("TCP_KEEPIDLE", 2 * part_s),
        ("TCP_KEEPINTVL", part_s),
        ("TCP_KEEPCNT", PARTS - 2),
        ("TCP_USER_TIMEOUT", 1000 * silent_s),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
