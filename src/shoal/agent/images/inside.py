"""What the kernel shows of the processes in a container."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shoal.agent.ownership import read_process


def is_apart(pid: int) -> bool:
    """Is it in a process namespace other than ours?"""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/pid").st_ino != os.stat("/proc/self/ns/pid").st_ino
    return False


def inside(first: int) -> list[int]:
    """All living processes in the same namespace as this one, itself first."""
    try:
        space = os.stat(f"/proc/{first}/ns/pid").st_ino
    except OSError:
        return []
    found = [first]
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != first:
            with contextlib.suppress(OSError):
                seen = read_process(int(name))
                same = os.stat(f"/proc/{name}/ns/pid").st_ino == space
                if same and seen is not None and seen.state != "Z":
                    found.append(int(name))
    return found


def handles(pid: int, number: int) -> bool:
    """Does the process catch, ignore or hold back the signal?"""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return True
    masks = [
        int(line.split()[1], 16)
        for line in lines
        if line.startswith(("SigBlk", "SigIgn", "SigCgt"))
    ]
    return any(mask >> (number - 1) & 1 for mask in masks)
