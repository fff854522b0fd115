"""The kept folders of a node: made for members, filled from the head, copied there, and waited
for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from shoal.agent.blocks.doorkeeper import Doorkeeper
from shoal.agent.blocks.store import FILES
from shoal.agent.confine.tenant import own
from shoal.agent.faults import CannotStart
from shoal.agent.keeping.contents import Found, Stamp, open_folder, scan
from shoal.agent.keeping.copying import Copying, Message
from shoal.agent.keeping.holdings import CannotHold, Holdings, get
from shoal.link.sealed_files import SealError, clear_size, opened, sealed_size, start
from shoal.machine.files import lock
from shoal.machine.paths import Hangs, ask
from shoal.machine.spares import Spares
from shoal.model.blocks import BadManifest
from shoal.model.commands import Launch, Prepare
from shoal.model.job import Fault, MemberRef
from shoal.model.kept import (
    OUTPUT,
    PIECE_BYTES,
    CopyHeld,
    FileAnswer,
    FileSent,
    FileWanted,
    HoldCopy,
    KeptFile,
    Kind,
    path_problem,
)
from shoal.model.report import MemberExit

OUTPUTS = "outputs"  # in a node's folder: one for each job that has members here
# An exit waits so long for the member's files to arrive, unless none arrives for a while; the rest
# comes after the exit.
OUTPUT_S_MAX = 30.0
STALLED_S = 10.0
CHECKPOINT_S_MAX = 300.0  # longer: a job that moves needs its checkpoint where it goes


class Keeping:
    def __init__(
        self,
        directory: Path,
        root: str,
        send: Callable[[Message | CopyHeld], bool],
        want: Callable[[FileWanted], None],
        key_of: Callable[[MemberRef], bytes | None],
        own: str,
        doors: Doorkeeper,
    ) -> None:
        """`root` holds the checkpoint folders of jobs; it may be an address. `key_of`: the key of a
        member's job that asks for encryption."""
        self._outputs = Path(os.path.realpath(directory)) / OUTPUTS
        self._root = root
        self.spares = Spares(directory / "spare")
        self.holdings = Holdings(directory / "held", own, doors, send)
        self.copying = Copying(send, self.spares, key_of, self.holdings)
        self.fetching = Fetching(root, want, key_of, own)
        self._connected_at: float | None = None
        self._removing: set[asyncio.Task[None]] = set()

    # -- the beginning ---------------------------------------------------------------------

    def output(self, launch: Launch, *, apart: bool) -> dict[str, str]:
        """Its output folder, which it shares with the job's other members on this node."""
        if not launch.keeps or launch.env.get(OUTPUT):
            return {}
        path = f"{self._outputs}/{launch.ref.job}"
        try:
            self.spares.make(path, launch.uid if apart else 0)
            if apart:
                own(path, launch.uid)
        except OSError as error:
            raise CannotStart(f"cannot make its output folder: {error.strerror}") from error
        self.copying.watch(launch.ref, Kind.OUTPUT, path, _reader(launch, apart=apart))
        return {OUTPUT: path}

    def checkpoints(self, launch: Launch, path: str, *, apart: bool) -> None:
        """The member begins with this folder: what is saved in it from now on is the newest."""
        if not launch.travels or "://" in path or not path.startswith(f"{self._root}/"):
            return
        try:
            ask((path,), note_attempt, self._root, launch.ref)
        except Hangs:
            raise
        except OSError:
            pass
        if launch.copies:
            found = self.fetching.found.pop(launch.ref.job, {})
            user, peers = _reader(launch, apart=apart), launch.tenant if launch.peers else ""
            self.copying.watch(launch.ref, Kind.CHECKPOINT, path, user, peers=peers)
            self.copying.fetched(launch.ref, Kind.CHECKPOINT, found)

    def recall(self, ref: MemberRef) -> None:
        """A member of an earlier life may have left files that the head does not have."""
        path = self._outputs / ref.job
        if path.is_dir():
            user = path.stat().st_uid
            self.copying.watch(ref, Kind.OUTPUT, str(path), user if user else None, over=True)

    def sweep(self, jobs: set[str]) -> None:
        """At the start: folders of jobs that have no member here any more are at the head."""
        self.holdings.recall()
        with contextlib.suppress(OSError):
            for path in self._outputs.iterdir():
                if path.name not in jobs:
                    shutil.rmtree(path, ignore_errors=True)

    # -- the link --------------------------------------------------------------------------

    def reconnected(self) -> None:
        self._connected_at = time.monotonic()
        self.copying.reconnected()
        self.holdings.reconnected()

    def disconnected(self) -> None:
        self._connected_at = None
        self.copying.disconnected()

    def take(self, answer: FileAnswer) -> None:
        if answer.hold is not None:
            self.holdings.take(answer.hold)
        else:
            self.copying.take(answer)

    # -- the end ---------------------------------------------------------------------------

    def ended(self, ref: MemberRef, *, alone: bool) -> None:
        self.copying.ended(ref, alone=alone)

    def waits(self, exit_: MemberExit, ended_at: float) -> bool:
        """Should the exit wait for files? A job that is done needs no checkpoint elsewhere. Time
        without a controller does not count, because nobody could take the exit."""
        ref = exit_.ref
        if self._connected_at is None:
            return False
        since = max(ended_at, self._connected_at)
        waited_s = time.monotonic() - since
        if time.monotonic() - max(since, self.copying.moved_at(ref)) > STALLED_S:
            return False
        if waited_s <= OUTPUT_S_MAX and not self.copying.complete(ref, (Kind.OUTPUT,)):
            return True
        if exit_.code == 0 and not exit_.stopped:
            return False
        return waited_s <= CHECKPOINT_S_MAX and not self.copying.complete(ref, (Kind.CHECKPOINT,))

    def complete(self, ref: MemberRef) -> bool:
        return self.copying.complete(ref)

    def forget(self, ref: MemberRef) -> None:
        for path in self.copying.forget(ref):
            if _was_empty(path):
                continue
            removing = asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            task: asyncio.Task[None] = asyncio.ensure_future(removing)
            self._removing.add(task)
            task.add_done_callback(self._removing.discard)


def _was_empty(path: str) -> bool:
    """Most jobs keep nothing. What is large is removed beside the loop."""
    try:
        os.rmdir(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return True


def _reader(launch: Launch, *, apart: bool) -> int | None:
    """The owner of the files that may be read. In a container, other users may be its own."""
    return launch.uid if apart and not launch.image else None


# Fetches a job's checkpoints from the head before a member of a later attempt starts here.
#
# A job that ran elsewhere left its newest snapshot at the head. What this node has itself counts
# more if no later attempt ran elsewhere: it may be newer than the last copy. The folder is put
# together where no member can reach it, and takes its place in one step.


ANSWER_S_MAX = 5.0  # then it is requested again: the controller may have died
WINDOW = 8  # pieces requested at a time
TRIES = 10  # a newer snapshot may come to the head meanwhile
AWAY_S, AWAY_S_MAX = 5.0, 600.0  # nodes that hold it may come back
SPARE_BYTES = 256 << 20
LOCK_FILE = ".shoal-fetch.lock"
MEGA = 1e6


class Replaced(Exception):
    """What the head has is no longer what it listed."""


class Fetch:
    """For all members of an attempt on this node."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.waiters = 0
        self.got = 0
        self.size: int | None = None
        self.away = ""  # why no node that holds it gives it


class Fetching:
    """`want` sends a request to the controller, which may get lost."""

    def __init__(
        self,
        root: str,
        want: Callable[[FileWanted], None],
        key_of: Callable[[MemberRef], bytes | None],
        own: str = "",
    ) -> None:
        self._root = root
        self._want = want
        self._key_of = key_of
        self._own = own
        self._fetches: dict[tuple[str, int], Fetch] = {}
        self._done: dict[str, int] = {}  # job -> the attempt that has all it needs
        self._asked: dict[tuple[MemberRef, str, int], asyncio.Future[FileSent]] = {}
        self.found: dict[str, dict[str, Stamp]] = {}  # job -> files as the head has them

    def needed(self, order: Launch | Prepare) -> bool:
        return (
            isinstance(order, Launch)
            and order.travels
            and (order.continues or order.ref.attempt > 1)
            and "://" not in self._root
            and self._done.get(order.ref.job) != order.ref.attempt
        )

    def progress(self, order: Launch) -> str:
        fetch = self._fetches.get((order.ref.job, order.ref.attempt))
        if fetch is None or fetch.size is None:
            return "is asking the head for its checkpoints"
        if fetch.away and not fetch.got:
            return f"is waiting for nodes that hold its checkpoints: {fetch.away}"
        return f"is fetching its checkpoints: {fetch.got / MEGA:.1f} of {fetch.size / MEGA:.1f} MB"

    async def get(self, launch: Launch, uid: int) -> None:
        """Returns when they are here. `uid`: the user that they are for; 0: the agent's own."""
        key = launch.ref.job, launch.ref.attempt
        fetch = self._fetches.get(key)
        if fetch is None:
            fetch = self._fetches[key] = Fetch(asyncio.create_task(self._fetch(launch, uid)))
        fetch.waiters += 1
        try:
            await asyncio.shield(fetch.task)
        finally:
            fetch.waiters -= 1
            if not fetch.waiters:
                fetch.task.cancel()
                self._fetches.pop(key, None)

    def take(self, sent: FileSent) -> None:
        future = self._asked.get((sent.ref, sent.path, sent.offset))
        if future is not None and not future.done():
            future.set_result(sent)

    async def _fetch(self, launch: Launch, uid: int) -> None:
        job, attempt = launch.ref.job, launch.ref.attempt
        fetch = self._fetches[job, attempt]
        try:
            os.makedirs(self._root, mode=0o700, exist_ok=True)
            await self._persist(launch.ref, fetch, uid)
        except OSError as error:
            why = f"cannot fetch its checkpoints: {error.strerror or error}"
            raise CannotStart(why) from error
        while len(self._done) > 1_000:
            del self._done[next(iter(self._done))]
        self._done[job] = attempt

    async def _persist(self, ref: MemberRef, fetch: Fetch, uid: int) -> None:
        """Never without them: a job that starts over by itself loses more than time."""
        tries, began = 0, time.monotonic()
        while True:
            try:
                async with _alone(Path(self._root) / LOCK_FILE):  # not while it waits for nodes
                    await self._replace(ref, fetch, uid)
                return
            except Replaced as error:
                tries += 1
                if tries == TRIES:
                    raise CannotStart(f"cannot fetch its checkpoints: {error}") from None
            except (CannotHold, BadManifest) as error:
                if time.monotonic() - began > AWAY_S_MAX:
                    raise CannotStart(f"cannot fetch its checkpoints: {error}") from None
                fetch.away = str(error)
                await asyncio.sleep(AWAY_S)

    async def _replace(self, ref: MemberRef, fetch: Fetch, uid: int) -> None:
        listed = await self._ask(FileWanted(ref, Kind.CHECKPOINT))
        if self._key_of(ref):
            files = (replace(one, size=clear_size(one.size)) for one in listed.files)
            listed = replace(listed, files=tuple(files))
        place, fresh = Path(self._root) / ref.job, Path(self._root) / f".{ref.job}.fetched"
        await asyncio.to_thread(_restore, place, fresh)
        here = await asyncio.to_thread(_scan, place)
        newer = listed.attempt > attempt_here(self._root, ref.job)
        wanted = [one for one in listed.files if _differs(one, here, newer=newer)]
        fetch.size, fetch.got = sum(one.size for one in wanted), 0
        stale = newer and any(path not in {one.path for one in listed.files} for path in here.files)
        if wanted or stale:
            await asyncio.to_thread(_must_fit, Path(self._root), fresh, fetch.size)
            came = await self._from_peers(ref, listed.held, {one.path: one for one in wanted})
            for one in wanted:
                if one.path in came:
                    await asyncio.to_thread(
                        _place, came[one.path], fresh, one, ref.job, self._key_of(ref)
                    )
                    fetch.got += one.size
                else:
                    await self._file(ref, one, fresh, fetch, listed.snapshot)
            stay = {one.path for one in listed.files} if newer else set(here.files)
            stay -= {one.path for one in wanted}
            await asyncio.to_thread(_swap, place, fresh, stay & set(here.files), uid)
            await asyncio.to_thread(_clear_up, self._root, ref.job)
        note_attempt(self._root, ref)
        known = {one.path: one for one in listed.files}
        now = (await asyncio.to_thread(_scan, place)).files
        self.found[ref.job] = {
            path: stamp for path, stamp in now.items() if _same(known.get(path), stamp)
        }

    async def _from_peers(
        self, ref: MemberRef, held: tuple[HoldCopy, ...], wanted: dict[str, KeptFile]
    ) -> dict[str, Path]:
        """Files that other nodes hold, where they are now."""
        came = {}
        for copy in held if wanted else ():
            place = Path(self._root) / f".{ref.job}.{copy.manifest[:16]}.held"
            work = partial(get, place, copy.manifest, copy.peers, self._own, copy.size, wanted)
            holding = await asyncio.to_thread(work)
            holding.close()
            for path, _ in holding.layout.files:
                if path in wanted:
                    came[path] = place / FILES / path
        return came

    async def _file(
        self, ref: MemberRef, one: KeptFile, fresh: Path, fetch: Fetch, snapshot: int
    ) -> None:
        wrong = path_problem(one.path)
        if wrong:
            raise CannotStart(f"the head offers a checkpoint file that cannot be: {wrong}")
        key, sealed, size = self._key_of(ref), None, one.size
        if key:
            size = sealed_size(size)
        path = fresh / one.path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for begin in range(0, size, WINDOW * PIECE_BYTES):
                offsets = range(begin, min(size, begin + WINDOW * PIECE_BYTES), PIECE_BYTES)
                wanted = (
                    FileWanted(ref, Kind.CHECKPOINT, one.path, at, snapshot) for at in offsets
                )
                for sent in await asyncio.gather(*map(self._ask, wanted)):
                    if len(sent.data) != min(PIECE_BYTES, size - sent.offset):
                        raise Replaced(f"{one.path} has changed at the head")
                    data, offset = sent.data, sent.offset
                    if key:
                        chunk = offset // PIECE_BYTES
                        sealed = sealed or opened(
                            key, ref.job, Kind.CHECKPOINT, one.path, size, data
                        )
                        data = await asyncio.to_thread(sealed.open, chunk, data)
                        offset = start(chunk)
                    await asyncio.to_thread(os.pwrite, handle, data, offset)
                    fetch.got += len(data)
            os.utime(handle, ns=(one.modified_ms * 1_000_000,) * 2)
        except SealError as error:
            raise CannotStart(f"its checkpoint {one.path} {error}") from None
        finally:
            os.close(handle)

    async def _ask(self, wanted: FileWanted) -> FileSent:
        key = wanted.ref, wanted.path, wanted.offset
        future: asyncio.Future[FileSent] = asyncio.get_running_loop().create_future()
        self._asked[key] = future
        try:
            while True:
                self._want(wanted)
                done, _ = await asyncio.wait([future], timeout=ANSWER_S_MAX)
                if done:
                    break
        finally:
            self._asked.pop(key, None)
        sent = future.result()
        if sent.problem:
            raise Replaced(sent.problem)
        return sent


def _clear_up(root: str, job: str) -> None:
    """What came from other nodes and was not needed."""
    for left in Path(root).glob(f".{job}.*.held"):
        shutil.rmtree(left, ignore_errors=True)


def _place(came: Path, fresh: Path, one: KeptFile, job: str, key: bytes | None) -> None:
    """A file that came from other nodes, in clear text."""
    path = fresh / one.path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not key:
        came.rename(path)
    else:
        size = came.stat().st_size
        try:
            with came.open("rb") as source, path.open("xb") as target:
                sealed, number = None, 0
                while piece := source.read(PIECE_BYTES):
                    sealed = sealed or opened(key, job, Kind.CHECKPOINT, one.path, size, piece)
                    target.write(sealed.open(number, piece))
                    number += 1
        except SealError as error:
            raise CannotStart(f"its checkpoint {one.path} {error}") from None
    os.utime(path, ns=(one.modified_ms * 1_000_000,) * 2)


def attempt_here(root: str, job: str) -> int:
    """The newest attempt that has run with this folder; 0: none."""
    try:
        return int((Path(root) / f".{job}.attempt").read_text())
    except (OSError, ValueError):
        return 0


def note_attempt(root: str, ref: MemberRef) -> None:
    path = Path(root) / f".{ref.job}.attempt"
    fresh = path.with_suffix(".new")
    fresh.write_text(str(ref.attempt))
    fresh.replace(path)


@contextlib.asynccontextmanager
async def _alone(path: Path) -> AsyncIterator[None]:
    """Several agents of one machine may share the folder; one of them fetches at a time."""
    handle = None
    while handle is None:  # it waits a moment itself
        handle = await asyncio.to_thread(lock, path)
    try:
        yield
    finally:
        os.close(handle)


def _scan(place: Path) -> Found:
    try:
        return scan(place)
    except FileNotFoundError:
        return Found({}, {})


def _same(one: KeptFile | None, stamp: Stamp) -> bool:
    return (
        one is not None
        and one.size == stamp.size
        and one.modified_ms == stamp.modified_ns // 1_000_000
    )


def _differs(one: KeptFile, here: Found, *, newer: bool) -> bool:
    stamp = here.files.get(one.path)
    return stamp is None or (newer and not _same(one, stamp))


def _must_fit(root: Path, fresh: Path, size: int) -> None:
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    free = shutil.disk_usage(root).free
    if free < size + SPARE_BYTES:
        raise CannotStart(
            f"no room for its checkpoints: {size / MEGA:.0f} MB, and {free / MEGA:.0f} MB are free",
            Fault.MISSING,
        )


def _swap(place: Path, fresh: Path, stay: set[str], uid: int) -> None:
    """The files that stay are in both folders, until the new one takes the place of the old one."""
    made = [(folder, name) for folder, _, names in os.walk(fresh) for name in names]
    for path in stay:
        with contextlib.suppress(FileNotFoundError):  # it has just gone
            folder, name = open_folder(place, path)
            try:
                (fresh / path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.link(name, fresh / path, src_dir_fd=folder, follow_symlinks=False)
            finally:
                os.close(folder)
    if uid:
        made += [(folder, ".") for folder, _, _ in os.walk(fresh)]
        for inside, name in made:
            os.chown(os.path.join(inside, name), uid, uid, follow_symlinks=False)
    old = _old(fresh)
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        place.rename(old)
    fresh.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _restore(place: Path, fresh: Path) -> None:
    """After an agent that was killed in `_swap`: its old folder counts if the new one does not."""
    old = _old(fresh)
    if not place.exists() and old.exists():
        old.rename(place)
    for left in (old, fresh):
        shutil.rmtree(left, ignore_errors=True)


def _old(fresh: Path) -> Path:
    return fresh.with_name(f"{fresh.name}.old")
