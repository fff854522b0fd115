"""Volumes from URLs: fetched on this node before a member starts, and shared by its tenant's jobs.

A helper process lists and fetches the files (url_helper.py), as the member's user and with the
member's own credentials. So each job needs the right to list a volume, also if it is here already.
Code that waits for the agent's children must skip those in `pids()` and pass them to `ended`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from shoal.agent.blocks.store import FILES, INDEX, SAYS, Offer
from shoal.agent.confine.launcher import Ends
from shoal.agent.confine.tenant import TMP_FOLDER, Apart
from shoal.agent.environments import Build, Turns
from shoal.agent.faults import CannotStart
from shoal.agent.inherited import build_env, inherited_env
from shoal.agent.keeping.url_cache import UrlCache, discard
from shoal.machine.kernel import NODE_MARK
from shoal.model.blocks import BYTES_OF_MBIT, Held, Seek, Sought, digest, volume_key
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
UNREAD_BYTES_MAX = 1 << 20  # of what it has not read; what it can take on is much less
MEGA = 1e6

ALL = b'{"all":true}'
HELPERS_MAX = 3  # one that was killed is started again, and goes on
BLOCK_LINE_BYTES = 200  # of what a helper prints for each block
LAZY_TIMES = 4  # one that has readers prints more
COMPLAINTS_MAX = 16

Order = TypeVar("Order", Launch, Prepare)


class Killed(CannotStart):
    """The helper has ended without a word."""


class Meets(Exception):
    """Others read this volume while it is fetched: `stream` has to end first."""

    def __init__(self, stream: Fetch) -> None:
        super().__init__()
        self.stream = stream


class Said(msgspec.Struct, frozen=True):
    """A line of a helper. A tenant's code may have written it."""

    fingerprint: str = ""
    size: int = 0
    total: int = 0  # of the whole volume, of which this may be a share
    count: int = 0
    got: int = 0
    done: bool = False
    changed: bool = False
    ready: bool = False  # readers may come
    problem: str = ""
    here: bool = False
    # As in `Seek`, if it `seeks`.
    seeks: bool = False
    blocks: tuple[tuple[int, bytes], ...] = ()
    refused: tuple[tuple[int, str, bool], ...] = ()
    origin: int = 0
    peers: int = 0
    wish: tuple[int, ...] = ()
    only: bool = False
    complaints: tuple[str, ...] = ()


class Means(NamedTuple):
    """What a member's helper gets: its variables, folders that it may read, and its Python."""

    env: dict[str, str]
    folders: tuple[str, ...]
    python: str


class Reads(NamedTuple):
    launch: Launch
    volume: Volume
    means: Means


class Fetch:
    """For all members of an attempt on this node. If it is `lazy`, it goes on while members read
    what arrives, also those of other attempts: then it is a stream."""

    def __init__(self, *, lazy: bool = False) -> None:
        self.lazy = lazy
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.readers: dict[MemberRef, Reads] = {}
        self.leader: MemberRef | None = None  # whose credentials its helper has
        self.turn = contextlib.AsyncExitStack()
        self.all = False
        self.task: asyncio.Task[str] | None = None
        self.waiters = 0
        self.got = 0
        self.size: int | None = None
        self.total = 0
        self.key = ""
        self.shared = ""  # what the head and other nodes call it; empty: it is not shared
        self.seek: Seek | None = None  # without what changes
        self.helper: Build | None = None
        self.input = -1  # of its helper
        self.unread = bytearray()  # lines that do not fit into its pipe now


class UrlVolumes:
    """`seek` sends a message to the head; `offer` lets other nodes fetch what is here."""

    def __init__(self, node: Path) -> None:
        self.apart: Apart | None = None
        self.name = ""  # of this node, in the head's words
        self.seek: Callable[[Seek], None] = lambda _: None
        self.offer: Callable[[Offer], None] = lambda _: None
        self.pace: Callable[[float], None] = lambda _: None  # of what is given to others
        self._node = node
        self._cache = UrlCache(node / "volumes")
        self._cache.clear_up()
        self._fetches: dict[tuple[str, ...], Fetch] = {}
        self._streams: dict[str, Fetch] = {}  # by their key
        self._mbit_s, self._paced = 0, False
        self._uses: dict[MemberRef, dict[str, str]] = {}  # variable -> key
        self._helpers: dict[int, Build] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._slots = Turns(AT_ONCE, PLACE_S_MAX)
        self._room = asyncio.Lock()

    @property
    def held(self) -> tuple[Held, ...]:
        return self._cache.held

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
        self._hold_to(launch.data_mbit_s)
        for volume in urls(launch):
            key = await self._join(launch, volume, means)
            paths[volume.variable] = str(self._cache.root / key / FILES)
        return msgspec.structs.replace(launch, env={**launch.env, **paths})

    def offer_all(self) -> None:
        """What is here since an earlier life of the agent."""
        for entry in self._cache.entries() if self._cache.held else ():
            if entry.shared and (self._cache.root / entry.key / INDEX).exists():
                folder, owner = str(self._cache.root / entry.key), entry.owner
                self.offer(Offer(key=entry.shared, folder=folder, owner=owner))

    def forget(self, ref: MemberRef) -> None:
        """It has ended, so that what it used may go."""
        self._uses.pop(ref, None)
        for stream in [one for one in self._streams.values() if one.readers.pop(ref, None)]:
            if not stream.readers and stream.task is not None:
                stream.task.cancel()
            elif stream.leader == ref and stream.helper is not None:
                _kill(stream.helper)  # the next one has credentials of somebody who still reads

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
        while True:
            fetch = self._fetches.get(name)
            if fetch is None:
                fetch = self._fetches[name] = Fetch(lazy=volume.name in launch.volume_lazy)
                reads = Reads(launch, volume, means)
                fetch.task = asyncio.create_task(self._fetch(fetch, reads))
            assert fetch.task is not None
            fetch.waiters += 1
            try:
                await asyncio.wait((fetch.task, fetch.ready), return_when=asyncio.FIRST_COMPLETED)
                if fetch.task.cancelled():
                    continue
                key = fetch.task.result() if fetch.task.done() else fetch.key
                stream = self._streams.get(key)
                if stream is not None:
                    stream.readers[launch.ref] = Reads(launch, volume, means)
                elif not self._cache.find(key):
                    continue  # its last reader has just left
                self._uses.setdefault(launch.ref, {})[volume.variable] = key
                return key
            finally:
                fetch.waiters -= 1
                if not fetch.waiters:
                    self._fetches.pop(name, None)
                    if not fetch.readers:
                        fetch.task.cancel()

    async def _fetch(self, fetch: Fetch, reads: Reads) -> str:
        launch, volume, _ = reads
        held = self.apart is not None and self.apart.holds(launch)
        owner = f"{launch.tenant}\0{launch.uid if held else 0}"
        turn = self._turns.setdefault(digest(volume.source, owner), asyncio.Lock())
        try:
            while True:
                async with fetch.turn:
                    await fetch.turn.enter_async_context(turn)
                    await fetch.turn.enter_async_context(self._slots.of(launch.tenant))
                    try:
                        return await self._tries(fetch, reads, owner)
                    except Meets as met:
                        stream = met.stream
                stream.all = True
                self._write(stream, ALL)
                assert stream.task is not None
                await asyncio.wait((stream.task,))
        except (CannotStart, OSError) as error:
            why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            if fetch.ready.done():  # its readers hear of it, too
                log.warning("volume %s: %s", volume.source, why)
                return ""
            fault = error.fault if isinstance(error, CannotStart) else Fault.NONE
            raise CannotStart(f"volume {volume.name}: {why}", fault) from error

    async def _tries(self, fetch: Fetch, reads: Reads, owner: str) -> str:
        """A helper that was killed is followed by another one."""
        failed = 0
        try:
            while True:
                got, fetch.leader = fetch.got, reads.launch.ref
                try:
                    return await self._run(fetch, reads, owner)
                except Killed:
                    left = fetch.readers and fetch.leader not in fetch.readers
                    moved = fetch.ready.done() and fetch.got > got
                    failed = 0 if left or moved else failed + 1
                    if failed == HELPERS_MAX:
                        raise
                    reads = next(iter(fetch.readers.values())) if left else reads
        finally:
            if self._streams.get(fetch.key) is fetch:
                del self._streams[fetch.key]

    async def _run(self, fetch: Fetch, reads: Reads, owner: str) -> str:
        """What a helper that was killed has left in its folder is used by the next one."""
        launch, volume, means = reads
        root = self._cache.root
        root.mkdir(mode=0o700, exist_ok=True)
        name = _place(fetch, launch, volume, owner)
        streams = self._streams.get(fetch.key) is fetch
        part = root / fetch.key if streams else root / f".{name}.part"
        output = root / f".{name}.log"
        part.mkdir(mode=0o700, exist_ok=True)
        end, fetch.input = os.pipe()
        fetch.unread.clear()
        os.set_blocking(fetch.input, False)
        fetch.helper, goes_on = None, False
        try:
            try:
                with output.open("wb") as file:
                    ends = Ends(end, file.fileno(), file.fileno())
                    words = (volume.source, *_shard(launch, volume))
                    fetch.helper = self._start(launch, words, part, means, ends, output)
            finally:
                os.close(end)
            self._pace_all()
            fresh = await self._follow(fetch, fetch.helper, launch, volume, owner)
            if fresh:
                part = root / fetch.key if self._streams.get(fetch.key) is fetch else part
                owner_id = self._offered("", part, launch).owner or 0
                known = volume_key(launch.tenant, volume.source), fetch.total
                put = partial(self._cache.put, part, fetch.key, *known, fetch.shared, owner_id)
                size = await asyncio.to_thread(put)
                log.info("volume %s is here: %s, %d bytes", fetch.key[:12], volume.source, size)
            if fetch.shared:
                self.offer(self._offered(fetch.shared, root / fetch.key, launch))
            return fetch.key
        except Killed:
            goes_on = True
            raise
        except BaseException:
            if fetch.shared:
                self.offer(Offer(key=fetch.shared))
            raise
        finally:
            os.close(fetch.input)
            fetch.input = -1
            self._tell_end(fetch)
            own = fetch.key if self._streams.get(fetch.key) is fetch else name
            self._cache.coming.pop(own, None)
            if fetch.helper is not None:
                await _end(fetch.helper)
            discard(output)
            if not goes_on and not streams:
                await asyncio.to_thread(discard, root / f".{name}.part")
            self._pace_all()

    def _offered(self, shared: str, folder: Path, launch: Launch) -> Offer:
        held = self.apart is not None and self.apart.holds(launch)
        return Offer(key=shared, folder=str(folder), owner=launch.uid if held else os.geteuid())

    def found(self, sought: Sought) -> None:
        """The head says where blocks are."""
        what = sought.ref, sought.source, sought.fingerprint
        for fetch in {*self._fetches.values(), *self._streams.values()}:
            seek = fetch.seek if fetch.input >= 0 else None
            if seek is not None and (seek.ref, seek.source, seek.fingerprint) == what:
                self._write(fetch, msgspec.json.encode(sought))

    def _hold_to(self, mbit_s: int) -> None:
        """What the policy allows this node, for all fetches together, and for what it gives."""
        if mbit_s != self._mbit_s:
            self._mbit_s = mbit_s
            self.pace(mbit_s * BYTES_OF_MBIT)
            self._pace_all()

    def _pace_all(self) -> None:
        fetches = [
            one for one in {*self._fetches.values(), *self._streams.values()} if one.input >= 0
        ]
        for fetch in fetches if self._mbit_s or self._paced else ():
            bytes_s = self._mbit_s * BYTES_OF_MBIT / len(fetches)
            self._write(fetch, msgspec.json.encode({"bytes_s": bytes_s}))
        self._paced = bool(self._mbit_s)

    def _write(self, fetch: Fetch, line: bytes) -> None:
        """A helper that reads nothing is asked to do no more than it said it could take."""
        if fetch.input >= 0 and len(fetch.unread) < UNREAD_BYTES_MAX:
            fetch.unread += line + b"\n"
        self._flush(fetch)

    @staticmethod
    def _flush(fetch: Fetch) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, or its reader has ended
            while fetch.unread:
                del fetch.unread[: os.write(fetch.input, fetch.unread)]

    def _tell_end(self, fetch: Fetch) -> None:
        if fetch.seek is not None:
            self.seek(msgspec.structs.replace(fetch.seek, over=True))
            fetch.seek = None

    async def _follow(
        self, fetch: Fetch, helper: Build, launch: Launch, volume: Volume, owner: str
    ) -> bool:
        """Until the files are in the helper's folder. False: the cache has them already."""
        seen, silent_s, most = 0, 0.0, SAID_BYTES_MAX
        while True:
            self._flush(fetch)
            before = fetch.got
            over = helper.ended.done()
            lines, more = _read(helper.output, seen)
            seen += more
            for said in lines:
                if said.problem:
                    raise CannotStart(
                        _plain(said.problem), Fault.MISSING if said.here else Fault.NONE
                    )
                if said.done and fetch.key:
                    self._relay(fetch, lines, volume)
                    await asyncio.wait([helper.ended], timeout=ENDS_S_MAX)
                    return True
                if said.ready:
                    await fetch.turn.aclose()
                    if not fetch.ready.done():
                        fetch.ready.set_result(None)
                if said.fingerprint:
                    if not await self._goes(fetch, launch, volume, said, owner):
                        return False
                    most = SAID_BYTES_MAX + BLOCK_LINE_BYTES * max(0, said.count)
                    most *= LAZY_TIMES if fetch.lazy else 1
                fetch.got = max(fetch.got, said.got)
            self._relay(fetch, lines, volume)
            if over:
                code = helper.ended.result()
                raise Killed(f"what fetches {volume.source} ended with code {code}")
            moves = fetch.got > before or any(said.fingerprint for said in lines)
            moves = moves or fetch.ready.done()  # what nobody reads need not come
            silent_s = 0.0 if moves else silent_s + LOOK_S
            if silent_s > SILENT_S_MAX or seen > most:
                minutes = f"{SILENT_S_MAX / 60:.0f} min"
                why = f"nothing of {volume.source} has arrived for {minutes}"
                raise CannotStart(why, Fault.MISSING)
            await asyncio.wait([helper.ended], timeout=LOOK_S)

    async def _goes(
        self, fetch: Fetch, launch: Launch, volume: Volume, said: Said, owner: str
    ) -> bool:
        """The helper has listed the files, and may fetch them. False: they are here."""
        shard = _shard(launch, volume)
        key = digest(volume.source, owner, said.fingerprint, *shard)
        if fetch.ready.done() and key != fetch.key:
            raise CannotStart(f"{volume.source} changed while it was read")
        fetch.key = key
        mark = "/".join((said.fingerprint, *shard))  # members of one share have the same blocks
        versioned = not said.fingerprint.startswith("?") and said.count > 0
        fetch.shared = digest(launch.tenant, volume.source, mark) if versioned else ""
        if self._cache.find(fetch.key):
            log.info("volume %s is used again", fetch.key[:12])
            return False
        stream = self._streams.get(fetch.key, fetch)
        if stream is not fetch and fetch.lazy:
            return False
        if stream is not fetch:
            fetch.shared = ""  # the stream offers it
            raise Meets(stream)
        name = _place(fetch, launch, volume, owner)
        if fetch.lazy and versioned:
            self._streams[fetch.key] = fetch
        lazy = fetch.key in self._streams
        await self._make_room(fetch.key if lazy else name, max(0, said.size))
        folder = self._cache.root / key
        if not fetch.ready.done():
            part = self._cache.root / f".{name}.part"
            folder = await asyncio.to_thread(self._cache.adopt, part, key, streams=lazy)
        fetch.size, fetch.total, fetch.got = said.size, said.total, 0
        if fetch.shared:
            fetch.seek = Seek(
                ref=launch.ref,
                source=volume.source,
                fingerprint=mark,
                count=said.count,
                begins=True,
            )
            self.offer(self._offered(fetch.shared, folder, launch))
        alone = not (fetch.shared and self.name)
        go = {"node": self.name or "-", "alone": alone, "lazy": lazy, "all": fetch.all}
        self._write(fetch, msgspec.json.encode(go))
        return True

    def _relay(self, fetch: Fetch, lines: list[Said], volume: Volume) -> None:
        """What a helper has said in a moment is one message to the head."""
        asks = [said for said in lines if said.seeks]
        for said in lines:
            for complaint in said.complaints[:COMPLAINTS_MAX]:
                log.warning("volume %s: %s", volume.source, _plain(complaint))
        if fetch.seek is None:
            return
        if any(said.changed for said in lines):
            self.seek(msgspec.structs.replace(fetch.seek, changed=True))
        elif asks:
            self.seek(
                msgspec.structs.replace(
                    fetch.seek,
                    got=tuple(block for said in asks for block in said.blocks),
                    refused=tuple(one for said in asks for one in said.refused),
                    origin=asks[-1].origin,
                    peers=asks[-1].peers,
                    wish=asks[-1].wish,
                    only=asks[-1].only,
                )
            )
            fetch.seek = msgspec.structs.replace(fetch.seek, begins=False)

    async def _make_room(self, place: str, size: int) -> None:
        used = {key for keys in self._uses.values() for key in keys.values()}
        used |= {fetch.key for fetch in self._fetches.values()} | set(self._streams)
        async with self._room:
            for shared in await asyncio.to_thread(self._cache.make_room, place, size, used):
                self.offer(Offer(key=shared))

    def _start(
        self,
        launch: Launch,
        words: tuple[str, ...],
        part: Path,
        means: Means,
        ends: Ends,
        output: Path,
    ) -> Build:
        argv = (means.python, "-P", "-m", "shoal.agent.keeping.url_helper", *words)
        if self.apart is not None and self.apart.holds(launch):
            pid, group = self.apart.build(launch, argv, part, ends, means.env, means.folders)
            helper = Build(pid, None, group, output)
        else:
            home = part / TMP_FOLDER  # not the operator's, which may hold credentials
            home.mkdir(exist_ok=True)
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


def _plain(text: str) -> str:
    return "".join(one if one.isprintable() else " " for one in text[:500])


def _name(launch: Launch, volume: Volume) -> tuple[str, ...]:
    return launch.ref.job, str(launch.ref.attempt), volume.source, *_shard(launch, volume)


def _place(fetch: Fetch, launch: Launch, volume: Volume, owner: str) -> str:
    """Of the folder in which it begins. What is not lazy goes on with the rest of another fetch."""
    mark = (launch.ref.job, str(launch.ref.attempt)) if fetch.lazy else ()
    return digest(volume.source, owner, *mark)


def _shard(launch: Launch, volume: Volume) -> tuple[str, ...]:
    """Which share of the files the member gets, as words for its helper; none: all files."""
    if volume.name not in launch.volume_shard:
        return ()
    return str(launch.ref.member), launch.env["SHOAL_MEMBERS"]


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
        _kill(helper)
        await asyncio.wait([helper.ended], timeout=ENDS_S_MAX)


def _kill(helper: Build) -> None:
    if not helper.ended.done():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(helper.pid, signal.SIGKILL)
