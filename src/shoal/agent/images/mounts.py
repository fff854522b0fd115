"""Which folders of the node a container gets. The agent may be root, and a tenant is not.

Root mounts whatever it is asked to. So a folder that a tenant names is followed from the top, as
the kernel would for that tenant: each folder on the way must let it pass. What is mounted is the
first folder in which the tenant may write, so that nothing can be exchanged after this check.
"""

from __future__ import annotations

import os
import stat

from shoal.agent.faults import CannotStart
from shoal.agent.images.render import Mount
from shoal.model.job import Fault


def named_by_user(field: str, path: str, uid: int) -> Mount | None:
    """The mount that makes this folder visible to `uid` (0: the agent's own user). None if the
    image's own folder is meant."""
    if not os.path.isdir(path):
        raise CannotStart(f"{field} {path} is not a directory on this node", Fault.MISSING)
    if os.path.realpath(path) == "/":
        return None  # the whole machine has no place in an image
    if not uid:
        return Mount(path, writable=True)
    real = os.path.realpath(path)
    at, sticky = "", False
    for part in real.split("/")[1:]:
        at = f"{at}/{part}"
        seen = os.lstat(at)
        if not stat.S_ISDIR(seen.st_mode) or not _may(seen, uid, stat.S_IXOTH):
            raise CannotStart(f"{field} {path}: this tenant may not enter {at} on this node")
        if sticky and seen.st_uid == uid:
            problem = "is in a folder that everyone can write to; use a package or another folder"
            raise CannotStart(f"{field} {path} {problem}")
        writable = _may(seen, uid, stat.S_IWOTH)
        sticky = writable and bool(seen.st_mode & stat.S_ISVTX)
        if writable and not sticky:
            break
    return Mount(at, writable=True)


def _may(seen: os.stat_result, uid: int, bit: int) -> bool:
    """As the kernel decides it for a user who is alone in a group with the same number."""
    if seen.st_uid == uid:
        bit <<= 6
    elif seen.st_gid == uid:
        bit <<= 3
    return bool(seen.st_mode & bit)
