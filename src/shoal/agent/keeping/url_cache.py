"""Volumes that this node fetched from URLs: folders on its disk, within a bound.

A folder has its name only when it is whole, and a file beside it with its size; that file's time is
the time of its last use. What has no such file is the rest of a fetch that was killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from shoal.agent.faults import CannotStart
from shoal.agent.unpack import remove as remove_read_only
from shoal.model.job import Fault

log = logging.getLogger("shoal.agent")

FILES = "files"  # in a folder of the cache: what the member sees
SIZE = ".size"
SHARE = 2  # the cache takes at most one half of what is free without it
MEGA = 1e6


class Entry(NamedTuple):
    used_ns: int
    size: int
    key: str


class UrlCache:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.coming: dict[str, int] = {}  # bytes of fetches under way

    def clear_up(self) -> None:
        """What an earlier life of the agent had not finished."""
        if self.root.is_dir():
            for path in self.root.iterdir():
                whole = path.name.removesuffix(SIZE)
                if not (self.root / whole).is_dir() or not (self.root / f"{whole}{SIZE}").exists():
                    discard(path)

    def find(self, key: str) -> bool:
        """Is it here? This counts as a use."""
        if not (self.root / key / FILES).is_dir():
            return False
        try:
            os.utime(self.root / f"{key}{SIZE}")
        except OSError:
            return False
        return True

    def make_room(self, fetch: str, size: int, used: set[str]) -> None:
        """The least recently used go first; `used` stay. Raises CannotStart: another node may
        have room."""
        self.coming.pop(fetch, None)
        entries = self._entries()
        total = sum(entry.size for entry in entries)
        limit = (self._free() + total) // SHARE
        wanted = size + sum(self.coming.values())
        stays = sum(entry.size for entry in entries if entry.key in used)
        if wanted + stays > limit:
            raise CannotStart(
                f"{size / MEGA:.1f} MB do not fit: this node has {limit / MEGA:.0f} MB for volumes "
                f"from URLs, and {(stays + wanted - size) / MEGA:.0f} MB are in use",
                Fault.MISSING,
            )
        for entry in entries:
            if total + wanted <= limit:
                break
            if entry.key not in used:
                log.info("removing volume %s, the least recently used", entry.key[:12])
                (self.root / f"{entry.key}{SIZE}").unlink(missing_ok=True)
                discard(self.root / entry.key)
                total -= entry.size
        self.coming[fetch] = size

    def put(self, part: Path, key: str) -> int:
        """Give a fetched folder its name. Returns the bytes in it."""
        if os.geteuid() == 0:  # so that a process that a tenant left there cannot replace it
            os.chown(part, 0, 0, follow_symlinks=False)
        if (part / FILES).is_symlink() or not (part / FILES).is_dir():
            raise CannotStart("what was fetched is not a folder")
        for path in part.iterdir():
            if path.name != FILES:
                discard(path)
        size = _bytes_of(part / FILES)
        (self.root / f"{key}{SIZE}").unlink(missing_ok=True)  # without it, the folder is not whole
        discard(self.root / key)
        part.rename(self.root / key)
        fresh = self.root / f".{key}{SIZE}"
        fresh.write_text(str(size))
        fresh.rename(self.root / f"{key}{SIZE}")
        return size

    def _free(self) -> int:
        return shutil.disk_usage(self.root).free

    def _entries(self) -> list[Entry]:
        """The least recently used first."""
        found = []
        for path in self.root.glob(f"*{SIZE}"):
            with contextlib.suppress(OSError, ValueError):
                size = int(path.read_text())
                found.append(Entry(path.stat().st_mtime_ns, size, path.name.removesuffix(SIZE)))
        return sorted(found)


def discard(path: Path) -> None:
    """Root needs no permission, and must not change that of files a tenant can exchange."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif os.geteuid() == 0:
            shutil.rmtree(path)
        else:
            remove_read_only(path)


def _bytes_of(folder: Path) -> int:
    return sum(
        os.lstat(os.path.join(place, name)).st_size
        for place, _, names in os.walk(folder)
        for name in names
    )
