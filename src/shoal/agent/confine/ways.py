"""Which folders a tenant's user may enter, and where links lead, as of at most a second ago.

A member starts with some twenty paths, whose folders are the same for every member. What is found
here only decides what is shown at which place; the kernel asks for permission all the same.
"""

from __future__ import annotations

import os
import stat
import time

from shoal.agent.confine.launcher import Shown

FRESH_S = 1.0


class Ways:
    def __init__(self) -> None:
        self._walls: dict[tuple[str, int], str] = {}
        self._real: dict[str, str] = {}
        self._until = 0.0

    def barrier(self, path: str, uid: int) -> str:
        """The first folder on the way to the path that the user may not enter, or nothing."""
        self._keep_fresh()
        return self._wall(os.path.dirname(os.path.abspath(path)), uid)

    def real(self, path: str) -> str:
        """As os.path.realpath; only the last part is looked at each time."""
        self._keep_fresh()
        folder, name = os.path.split(path)
        if not name or name in (".", "..") or not folder:
            return os.path.realpath(path)
        real = self._real.get(folder)
        if real is None:
            real = self._real[folder] = os.path.realpath(folder)
        place = f"{real.rstrip('/')}/{name}"
        return os.path.realpath(place) if os.path.islink(place) else place

    def show(self, path: str, uid: int, *, writable: bool) -> Shown:
        """At its own path, if links above the first barrier are followed."""
        wall = self.barrier(path, uid)
        source = self.real(path)
        if not wall:
            return Shown(source, source, "", writable)
        real = self.real(wall)
        return Shown(real + path[len(wall) :], source, real, writable)

    def _wall(self, folder: str, uid: int) -> str:
        wall = self._walls.get((folder, uid))
        if wall is None:
            above = os.path.dirname(folder)
            wall = self._wall(above, uid) if above != folder else ""
            if not wall and not _may_enter(folder, uid):
                wall = folder
            self._walls[folder, uid] = wall
        return wall

    def _keep_fresh(self) -> None:
        now = time.monotonic()
        if now >= self._until:
            self._walls.clear()
            self._real.clear()
            self._until = now + FRESH_S


def barrier(path: str, uid: int) -> str:
    """As it is now."""
    return Ways().barrier(path, uid)


def _may_enter(folder: str, uid: int) -> bool:
    """One that is not there keeps nobody out."""
    try:
        info = os.stat(folder)
    except OSError:
        return True
    return bool(info.st_mode & (stat.S_IXUSR if info.st_uid == uid else stat.S_IXOTH))
