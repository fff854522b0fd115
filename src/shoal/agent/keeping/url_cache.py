"""Volumes that this node fetched from URLs: folders on its disk, within a bound.

A folder has its name only when it is whole, and a file beside it with its size; that file's time is
the time of its last use. What has no such file is the rest of a fetch that was killed. The next
fetch of the same URL goes on with it; until then it counts, and goes, like the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from pathlib import Path
from typing import NamedTuple

from shoal.agent.blocks.store import FILES, INDEX, PARTS
from shoal.agent.faults import CannotStart
from shoal.agent.packages import remove as remove_read_only
from shoal.model.blocks import HOLDINGS_MAX, Held
from shoal.model.job import Fault
from shoal.model.volume import READERS

log = logging.getLogger("shoal.agent")

MEGA = 1e6
SIZE = ".size"
PART = ".part"
SHARE = 2  # the cache takes at most one half of what is free without it
TOTAL_BYTES_MAX = 1 << 50  # whatever a tenant's helper says
PART_S_MAX = 86_400.0  # the rest of a fetch is kept for so long


class Entry(NamedTuple):
    used_ns: int
    size: int
    key: str
    volume: str = ""  # its `volume_key`; empty: an earlier version fetched it
    total: int = 0
    shared: str = ""  # what other nodes know it as; empty: it is not offered
    owner: int = 0  # whose files they are


class UrlCache:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.coming: dict[str, int] = {}  # bytes of fetches under way
        self.held: tuple[Held, ...] = ()  # for the node's report, the last used last

    def clear_up(self) -> None:
        """What an earlier life of the agent had not finished."""
        if self.root.is_dir():
            for path in self.root.iterdir():
                whole = path.name.removesuffix(SIZE)
                if (self.root / whole).is_dir() and (self.root / f"{whole}{SIZE}").exists():
                    continue
                if not self._goes_on(path):
                    discard(path)
            self.count()

    def _goes_on(self, part: Path) -> bool:
        with contextlib.suppress(OSError):
            return time.time() - os.lstat(part / INDEX).st_mtime < PART_S_MAX
        return False

    def entries(self) -> list[Entry]:
        """The least recently used first."""
        found = []
        for path in self.root.glob(f"*{SIZE}"):
            with contextlib.suppress(OSError, ValueError):
                words = [*path.read_text().split(" "), "", "0", "", "0"][:5]
                key, used_ns = path.name.removesuffix(SIZE), path.stat().st_mtime_ns
                size, volume, total, shared, owner = words
                numbers = int(size), int(total), int(owner)
                found.append(
                    Entry(used_ns, numbers[0], key, volume, numbers[1], shared, numbers[2])
                )
        return sorted(found)

    def count(self) -> None:
        """What is here of each volume. Of several states of one, the last used counts; the shares
        of several members count together."""
        held: dict[str, Held] = {}
        for entry in self.entries() if self.root.is_dir() else ():
            before = held.pop(entry.volume, None)
            if entry.volume:
                more = before.held_bytes if before and before.size_bytes == entry.total else 0
                size = min(entry.size + more, entry.total)
                held[entry.volume] = Held(entry.volume, size, entry.total)
        self.held = tuple(held.values())[-HOLDINGS_MAX:]

    def find(self, key: str) -> bool:
        """Is it here? This counts as a use."""
        if not (self.root / key / FILES).is_dir():
            return False
        try:
            os.utime(self.root / f"{key}{SIZE}")
        except OSError:
            return False
        return True

    def make_room(self, fetch: str, size: int, used: set[str]) -> list[str]:
        """The least recently used go first; `used` stay. Returns what can be offered no more.
        Raises CannotStart: another node may have room."""
        self.coming.pop(fetch, None)
        entries = sorted([*self.entries(), *self._parts(fetch)])
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
        gone = []
        for entry in entries:
            if total + wanted <= limit:
                break
            if entry.key not in used:
                log.info("removing volume %s, the least recently used", entry.key[:12])
                (self.root / f"{entry.key}{SIZE}").unlink(missing_ok=True)
                discard(self.root / entry.key)
                total -= entry.size
                gone.append(entry.shared)
        self.coming[fetch] = size
        self.count()
        return gone

    def _parts(self, fetch: str) -> list[Entry]:
        """The rests of fetches that are not under way."""
        found = []
        busy = {name for place in (fetch, *self.coming) for name in (place, f".{place}{PART}")}
        for path in self.root.iterdir():
            with contextlib.suppress(OSError):
                whole = (self.root / f"{path.name}{SIZE}").exists()
                if path.is_dir() and not whole and path.name not in busy:
                    size = _bytes_of(path)
                    found.append(Entry(path.stat().st_mtime_ns, size, path.name))
        return found

    def adopt(self, part: Path, key: str, *, streams: bool) -> Path:
        """What readers had fetched goes on. What readers get has its place at once, because they
        read files in it before all of them are here."""
        folder = self.root / key
        with contextlib.suppress(OSError):
            if os.lstat(folder).st_uid == os.lstat(part).st_uid:
                for name in (FILES, PARTS, INDEX):
                    discard(part / name)
                    (folder / name).rename(part / name)
        discard(folder)
        if streams:
            part = part.rename(folder)
        return part

    def put(
        self,
        part: Path,
        key: str,
        volume: str = "",
        total: int = 0,
        shared: str = "",
        owner: int = 0,
    ) -> int:
        """Give a fetched folder its name. Returns the bytes in it."""
        if os.geteuid() == 0:  # so that a process that a tenant left there cannot replace it
            os.chown(part, 0, 0, follow_symlinks=False)
        if (part / FILES).is_symlink() or not (part / FILES).is_dir():
            raise CannotStart("what was fetched is not a folder")
        for path in (*part.iterdir(), part / FILES / READERS):
            if path.name not in (FILES, INDEX):
                discard(path)
        size = _bytes_of(part / FILES)
        (self.root / f"{key}{SIZE}").unlink(missing_ok=True)  # without it, the folder is not whole
        if part != self.root / key:
            discard(self.root / key)
            part.rename(self.root / key)
        fresh = self.root / f".{key}{SIZE}"
        total = min(max(size, total), TOTAL_BYTES_MAX)
        fresh.write_text(f"{size} {volume} {total} {shared} {owner}")
        fresh.rename(self.root / f"{key}{SIZE}")
        self.count()
        return size

    def _free(self) -> int:
        return shutil.disk_usage(self.root).free


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
