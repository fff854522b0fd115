"""InfiniBand and RoCE cards: the files by which members use them, and what is in the way."""

from __future__ import annotations

import contextlib
import os
import resource
import stat

from shoal.agent.confine.limits import Device
from shoal.model.node import RDMA_OPEN, RDMA_ROOT

ROOT = "SHOAL_RDMA_ROOT"  # where sys and dev are; for tests
CARDS, FILES = "sys/class/infiniband", "dev/infiniband"
INSIDE = "/dev/infiniband"  # where programs look for them
# Connections and memory. Not umad and issm, by which a program could manage the whole fabric.
NAMES = ("uverbs", "rdma_cm")
LOCKED = resource.RLIMIT_MEMLOCK


def files() -> list[Device]:
    folder = f"{_root()}/{FILES}"
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(os.listdir(folder)):
            info = os.stat(f"{folder}/{name}")
            if name.startswith(NAMES) and stat.S_ISCHR(info.st_mode):
                numbers = os.major(info.st_rdev), os.minor(info.st_rdev)
                found.append(Device(f"{folder}/{name}", *numbers))
    return found


def look() -> str:
    """Empty: there are no cards. RDMA_OPEN: all members can use them; RDMA_ROOT: all but those that
    run as a tenant's user. Otherwise why they cannot. Cards read and write memory that cannot be
    moved, so members may lock all that they may have."""
    try:
        if not os.listdir(f"{_root()}/{CARDS}"):
            return ""
    except OSError:
        return ""
    verbs = [device.path for device in files() if "uverbs" in device.path]
    if not verbs:
        return f"there is no {INSIDE}/uverbs0: load ib_uverbs, or let the agent's container have it"
    if not all(os.access(path, os.R_OK | os.W_OK) for path in verbs):
        return f"the agent's user may not open {INSIDE}"
    if (most := _unlocked()) != resource.RLIM_INFINITY:
        return f"a process may lock only {most >> 10} KiB of memory: LimitMEMLOCK=infinity"
    rights = stat.S_IROTH | stat.S_IWOTH
    everyone = all(os.stat(path).st_mode & rights == rights for path in verbs)
    return RDMA_OPEN if everyone else RDMA_ROOT


def _unlocked() -> int:
    """How much members may lock: all that the agent may give them."""
    soft, hard = resource.getrlimit(LOCKED)
    for most in (resource.RLIM_INFINITY, hard):
        with contextlib.suppress(OSError, ValueError):
            if (soft, hard) != (most, most):
                resource.setrlimit(LOCKED, (most, most))
            return most
    return soft


def _root() -> str:
    return os.environ.get(ROOT, "")
