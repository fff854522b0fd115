"""How this node's agent reaches meetings at the head: as it reaches the head itself, never by an
address that a user names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.folder import LINK_FILE
from shoal.meeting import KEY_HEADER, NotAdmitted, dial, ws_error
from shoal.transport import SOCKET_NAME

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection


async def enter(directory: Path, meeting: str, key: str) -> ClientConnection:
    """NotAdmitted if the head does not know the meeting, OSError if no head answers."""
    path, headers = f"/v1/meetings/{meeting}/enter", {KEY_HEADER: key}
    if not (directory / LINK_FILE).exists():  # a node of the head's own machine
        socket = directory.parent.parent / SOCKET_NAME
        return await dial("http://localhost", path, headers, "", "", socket)
    from shoal.agent.dialling import read_link_file

    try:
        file = read_link_file(directory)
    except ValueError as error:
        raise OSError(str(error)) from None
    problem: Exception = OSError(f"{LINK_FILE} names no URL")
    for url, name in file.ways.items():
        try:
            return await dial(url, path, headers, name, file.certificate)
        except NotAdmitted:
            raise
        except (OSError, TimeoutError, ws_error()) as error:
            problem = error
    raise OSError(str(problem) or "no answer") from problem
