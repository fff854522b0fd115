"""Ports for programs that start in a moment. The kernel gives those from 32768 on to whoever
connects somewhere, so one of them may be taken before its program starts. Gangs meet below."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, OF_EACH = 32_010, 90  # for each worker of a test run
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
_next = itertools.count(os.getpid())


def free_port() -> int:
    """Not given again until many others were."""
    for _ in range(OF_EACH):
        port = FIRST + _WORKER * OF_EACH + next(_next) % OF_EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
