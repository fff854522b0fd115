"""Ends what a dead node has left: its processes and containers. The keeper and the starter use it,
so it imports next to nothing."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from shoal.machine.cgroups import end_groups
from shoal.machine.files import AGENT_LOCK, lock
from shoal.machine.kernel import NODE_MARK, kill_marked

FOLDER = "containers"  # in a node's directory: a folder for each container that may exist
SWEEP = "sweep"  # in there: the command that removes them all
SWEEP_S_MAX = 20.0
POLL_S = 0.005
# For processes that were killed to be gone. One that waits for a dead disk may take longer; by then
# the node would be given up in any case.
GONE_S_MAX = 60.0


def end_node(directory: Path) -> bool:
    """Nothing of the node is left when this returns, so its death may be announced. A keeper sees
    to that itself; this is for one that was killed. It holds the node's lock meanwhile, so that
    nobody takes the node for dead. False: an agent lives there."""
    try:
        handle = lock(directory / AGENT_LOCK)
    except OSError:  # a full or read-only disk; then no agent can start either
        handle = -1
    if handle is None:
        return False
    try:
        end_groups(directory)
        end_marked(directory)
        sweep(directory)
    finally:
        if handle >= 0:
            os.close(handle)
    return True


def end_marked(directory: Path, within_s: float = GONE_S_MAX) -> int:
    """Kill the processes that carry the node's mark until none is found; returns how many there
    were at first."""
    deadline = time.monotonic() + within_s
    first = left = kill_marked(NODE_MARK, str(directory).__eq__)
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = kill_marked(NODE_MARK, str(directory).__eq__)
    return first


def sweep(directory: Path) -> None:
    """Costs nothing where there are none."""
    root = directory / FOLDER
    try:
        left = [name for name in os.listdir(root) if name != SWEEP]
    except OSError:
        return
    if not left:
        return
    import subprocess

    try:
        words = ["/bin/sh", str(root / SWEEP)]
        subprocess.run(words, capture_output=True, timeout=SWEEP_S_MAX, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"containers may be left, see {root}: {error}", file=sys.stderr)
        return
    for name in left:
        shutil.rmtree(root / name, ignore_errors=True)
