"""Keeps the controller's own log within its size: a full one becomes the file before it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger("shoal.control")

LOG_BYTES_MAX = 64 << 20  # and as much in the file before it
LOOK_S = 60.0


def bound(path: Path, most: int = LOG_BYTES_MAX) -> bool:
    """Processes that hold it open append to it, so it keeps its inode: only its content moves."""
    try:
        if path.stat().st_size <= most:
            return False
        before = path.with_name(f"{path.name}.1")
        shutil.copyfile(path, before)
        before.chmod(0o600)
        os.truncate(path, 0)
    except OSError as error:  # the disk is full, or somebody else has taken it away
        log.debug("%s stays as it is: %s", path, error)
        return False
    return True


async def watch(path: Path) -> None:
    while True:
        await asyncio.to_thread(bound, path)
        await asyncio.sleep(LOOK_S)
