"""Volumes from URLs: fetched on this node before a member starts, and shared by its tenant's jobs.

A helper process lists and fetches the files (url_helper.py), as the member's user and with the
member's own credentials. So each job needs the right to list a volume, also if it is here already.
Code that waits for the agent's children must skip those in `pids()` and pass them to `ended`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from shoal.agent.confine.launcher import Ends
from shoal.agent.confine.tenant import TMP_FOLDER, Apart
from shoal.agent.environments import Build, Turns
from shoal.agent.faults import CannotStart
from shoal.agent.inherited import build_env, inherited_env
from shoal.agent.keeping.url_helper import SAYS
from shoal.agent.packages import remove as remove_read_only
from shoal.machine.kernel import NODE_MARK
from shoal.model.commands import Launch, Prepare
from shoal.model.job import Fault, MemberRef
from shoal.model.volume import Volume, parse

log = logging.getLogger("shoal.agent")

AT_ONCE = 2  # helpers; each of them fetches several files at a time
PLACE_S_MAX = 60.0
LOOK_S = 0.2
SILENT_S_MAX = 600.0
ENDS_S_MAX = 5.0
SAID_BYTES_MAX = 16 << 20  # of what a helper prints
MEGA = 1e6

Order = TypeVar("Order", Launch, Prepare)


class Said(msgspec.Struct, frozen=True):
    """A line of a helper. A tenant's code may have written it."""

    fingerprint: str = ""
    size: int = 0
    got: int = 0
    done: bool = False
    problem: str = ""
    here: bool = False


class Means(NamedTuple):
    """What a member's helper gets: its variables, folders that it may read, and its Python."""

    env: dict[str, str]
    folders: tuple[str, ...]
    python: str


class Fetch:
    """For all members of an attempt on this node."""

    def __init__(self) -> None:
        self.task: asyncio.Task[str] | None = None
        self.waiters = 0
        self.got = 0
        self.size: int | None = None
        self.key = ""


class UrlVolumes:
    def __init__(self, node: Path) -> None:
        self.apart: Apart | None = None
        self._node = node
        self._cache = UrlCache(node / "volumes")
        self._cache.clear_up()
        self._fetches: dict[tuple[str, int, str], Fetch] = {}
        self._uses: dict[MemberRef, dict[str, str]] = {}  # variable -> key
        self._helpers: dict[int, Build] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slots = Turns(AT_ONCE, PLACE_S_MAX)
        self._room = asyncio.Lock()

    def needed(self, order: Launch | Prepare) -> bool:
        return isinstance(order, Launch) and len(urls(order)) > len(self._uses.get(order.ref, {}))

    def progress(self, order: Launch) -> str:
        for volume in urls(order):
            fetch = self._fetches.get(_name(order, volume))
            if fetch is not None and fetch.size is None:
                return f"is looking at volume {volume.name}"
            if fetch is not None and fetch.size is not None:
                got, size = fetch.got / MEGA, fetch.size / MEGA
                return f"is fetching volume {volume.name}: {got:.1f} of {size:.1f} MB"
        return "is waiting for its volumes"

    async def get(self, launch: Order, means_of: Callable[[Launch], Means]) -> Order:
        """Returns the command with their paths when they are here; raises CannotStart."""
        if isinstance(launch, Prepare) or not self.needed(launch):
            return launch
        paths, means = {}, means_of(launch)
        for volume in urls(launch):
            key = await self._join(launch, volume, means)
            paths[volume.variable] = str(self._cache.root / key / FILES)
        return msgspec.structs.replace(launch, env={**launch.env, **paths})

    def forget(self, ref: MemberRef) -> None:
        """It has ended, so that what it used may go."""
        self._uses.pop(ref, None)

    def pids(self) -> set[int]:
        return set(self._helpers)

    def ended(self, pid: int, code: int) -> bool:
        helper = self._helpers.pop(pid, None)
        if helper is None:
            return False
        if helper.popen is not None:
            helper.popen.returncode = code
        if self.apart is not None and helper.group is not None:
            self.apart.groups.discard(helper.group)
        if not helper.ended.done():
            helper.ended.set_result(code)
        return True

    # -- how -------------------------------------------------------------------------------

    async def _join(self, launch: Launch, volume: Volume, means: Means) -> str:
        name = _name(launch, volume)
        fetch = self._fetches.get(name)
        if fetch is None:
            fetch = self._fetches[name] = Fetch()
            fetch.task = asyncio.create_task(self._fetch(fetch, launch, volume, means))
        assert fetch.task is not None
        fetch.waiters += 1
        try:
            key = await asyncio.shield(fetch.task)
            self._uses.setdefault(launch.ref, {})[volume.variable] = key
            return key
        finally:
            fetch.waiters -= 1
            if not fetch.waiters:
                fetch.task.cancel()
                self._fetches.pop(name, None)

    async def _fetch(self, fetch: Fetch, launch: Launch, volume: Volume, means: Means) -> str:
        held = self.apart is not None and self.apart.holds(launch)
        owner = f"{launch.tenant}\0{launch.uid if held else 0}"
        place = _digest(volume.source, owner)
        turn = self._turns.setdefault(place, asyncio.Lock())
        try:
            async with turn, self._slots.of(launch.tenant):
                return await self._run(fetch, launch, volume, means, owner)
        except CannotStart as error:
            raise CannotStart(f"volume {volume.name}: {error}", error.fault) from error
        except OSError as error:
            raise CannotStart(f"volume {volume.name}: {error.strerror or error}") from error

    async def _run(
        self, fetch: Fetch, launch: Launch, volume: Volume, means: Means, owner: str
    ) -> str:
        root = self._cache.root
        root.mkdir(mode=0o700, exist_ok=True)
        place = _digest(volume.source, owner)
        part, output = root / f".{place}.part", root / f".{place}.log"
        await asyncio.to_thread(discard, part)
        part.mkdir(mode=0o700)
        end, go = os.pipe()
        helper = None
        try:
            try:
                words = (volume.source, FILES)  # its working directory is `part`
                with output.open("wb") as file:
                    ends = Ends(end, file.fileno(), file.fileno())
                    helper = self._start(launch, words, part, means, ends)
            finally:
                os.close(end)
            if await self._follow(fetch, helper, volume, owner, go):
                size = await asyncio.to_thread(self._cache.put, part, fetch.key)
                log.info("volume %s is here: %s, %d bytes", fetch.key[:12], volume.source, size)
            return fetch.key
        finally:
            os.close(go)
            self._cache.coming.pop(place, None)
            if helper is not None:
                await _end(helper)
            discard(output)
            await asyncio.to_thread(discard, part)

    async def _follow(
        self, fetch: Fetch, helper: Build, volume: Volume, owner: str, go: int
    ) -> bool:
        """Until the files are in the helper's folder. False: the cache has them already."""
        seen, silent_s = 0, 0.0
        while True:
            over = helper.ended.done()
            lines, more = _read(helper.output, seen)
            seen += more
            for said in lines:
                if said.problem:
                    why = "".join(one if one.isprintable() else " " for one in said.problem[:500])
                    raise CannotStart(why, Fault.MISSING if said.here else Fault.NONE)
                if said.done and fetch.key:
                    await asyncio.wait([helper.ended], timeout=ENDS_S_MAX)
                    return True
                if said.fingerprint:
                    fetch.key = _digest(volume.source, owner, said.fingerprint)
                    if self._cache.find(fetch.key):
                        log.info("volume %s is used again", fetch.key[:12])
                        return False
                    await self._make_room(_digest(volume.source, owner), max(0, said.size))
                    fetch.size, fetch.got = said.size, 0
                    with contextlib.suppress(BrokenPipeError):
                        os.write(go, b"go\n")
                fetch.got = max(fetch.got, said.got)
            if over:
                code = helper.ended.result()
                raise CannotStart(f"what fetches {volume.source} ended with code {code}")
            silent_s = 0.0 if lines else silent_s + LOOK_S
            if silent_s > SILENT_S_MAX or seen > SAID_BYTES_MAX:
                minutes = f"{SILENT_S_MAX / 60:.0f} min"
                why = f"nothing of {volume.source} has arrived for {minutes}"
                raise CannotStart(why, Fault.MISSING)
            await asyncio.wait([helper.ended], timeout=LOOK_S)

    async def _make_room(self, place: str, size: int) -> None:
        used = {key for keys in self._uses.values() for key in keys.values()}
        used |= {fetch.key for fetch in self._fetches.values()}
        async with self._room:
            await asyncio.to_thread(self._cache.make_room, place, size, used)

    def _start(
        self, launch: Launch, words: tuple[str, ...], part: Path, means: Means, ends: Ends
    ) -> Build:
        argv = (means.python, "-P", "-m", "shoal.agent.keeping.url_helper", *words)
        output = part.with_suffix(".log")
        if self.apart is not None and self.apart.holds(launch):
            pid, group = self.apart.build(launch, argv, part, ends, means.env, means.folders)
            helper = Build(pid, None, group, output)
        else:
            home = part / TMP_FOLDER  # not the operator's, which may hold credentials
            home.mkdir()
            env = {**build_env(inherited_env(apart=True)), **means.env, "HOME": str(home)}
            popen = subprocess.Popen(
                argv,
                cwd=part,
                env=env | {NODE_MARK: str(self._node)},
                stdin=ends.input,
                stdout=ends.output,
                stderr=ends.error,
                start_new_session=True,
            )
            helper = Build(popen.pid, popen, None, output)
        self._helpers[helper.pid] = helper
        return helper


def urls(launch: Launch) -> list[Volume]:
    return [volume for volume in map(parse, launch.volumes) if volume.url]


def means(launch: Launch, private: dict[str, str], secrets: str) -> Means:
    """Of a member whose environment is built. Its variables without those that would change how
    the helper's Python runs."""
    env = {
        name: value
        for name, value in {**launch.env, **private}.items()
        if not name.startswith(("PYTHON", "LD_", "SHOAL_")) or name == "SHOAL_SECRETS"
    }
    own = launch.env.get("VIRTUAL_ENV", "") if launch.requirements and not launch.image else ""
    folders = tuple(folder for folder in (own, secrets) if folder)
    return Means(env, folders, f"{own}/bin/python" if own else sys.executable)


def _name(launch: Launch, volume: Volume) -> tuple[str, int, str]:
    return launch.ref.job, launch.ref.attempt, volume.source


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:32]


def _read(path: Path, start: int) -> tuple[list[Said], int]:
    """The lines that are complete, and how many bytes they are."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(1 << 20)
    whole = len(data) if len(data) == 1 << 20 else data.rfind(b"\n") + 1
    found = []
    for line in data[:whole].splitlines():
        if line.startswith(SAYS.encode()):
            with contextlib.suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line[len(SAYS) :], type=Said))
    return found, whole


async def _end(helper: Build) -> None:
    """All its processes, before its folder is removed."""
    if not helper.ended.done():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(helper.pid, signal.SIGKILL)
        await asyncio.wait([helper.ended], timeout=ENDS_S_MAX)


# Volumes that this node fetched from URLs: folders on its disk, within a bound.
#
# A folder has its name only when it is whole, and a file beside it with its size; that file's time
# is the time of its last use. What has no such file is the rest of a fetch that was killed.


FILES = "files"  # in a folder of the cache: what the member sees
SIZE = ".size"
SHARE = 2  # the cache takes at most one half of what is free without it


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
