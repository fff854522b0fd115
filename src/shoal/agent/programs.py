"""What must be so on this node before a member can start: its program is here, its port is free."""

from __future__ import annotations

import os
import shutil
import socket

from shoal.agent.faults import CannotStart
from shoal.model.job import Fault

PORT_MAX = 65_535


def check_port(text: str) -> None:
    """If another process held the port, it would answer the probe and get the requests."""
    if not text.isdecimal() or int(text) > PORT_MAX:
        raise CannotStart(f"PORT={text!r} is not a port that a replica can listen on")
    port = int(text)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise CannotStart(f"port {port} is not free on this node: {error.strerror}") from None


def find_program(program: str, workdir: str, path: str) -> str:
    if not os.path.isdir(workdir):
        raise CannotStart(f"workdir {workdir} is not a directory on this node", Fault.MISSING)
    if "/" in program:
        found = os.path.join(workdir, program)
        if not os.path.exists(found):
            raise CannotStart(f"{found} does not exist on this node", Fault.MISSING)
        if os.path.isdir(found) or not os.access(found, os.X_OK):
            raise CannotStart(f"{found} cannot be executed: is it a program, with chmod +x?")
        return found
    found_in_path = shutil.which(program, path=path)
    if found_in_path is None:
        raise CannotStart(f"no program {program!r} in PATH on this node", Fault.MISSING)
    return found_in_path
