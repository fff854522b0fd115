"""Where a controller of this machine answers, as its home says: for those who need no client."""

from __future__ import annotations

import msgspec

SOCKET_NAME = "controller.sock"


class Address(msgspec.Struct, frozen=True):
    """Where a running controller answers; it writes this to its home when it is ready. `socket` is
    for the user's own programs on this machine, `url` is for browsers and other machines. Those
    accept its certificate by the fingerprint, or without one if it is empty."""

    url: str
    pid: int
    socket: str = ""
    fingerprint: str = ""
