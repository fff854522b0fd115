"""A command that computes for a request, in a process of its own at low priority."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence

NICENESS = 10  # the cluster comes first


async def run_child(command: Sequence[str]) -> tuple[int, bytes, bytes]:
    """Its exit code and output; cancelling this ends the process."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        out, err = await process.communicate()
        return process.returncode or 0, out, err
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
