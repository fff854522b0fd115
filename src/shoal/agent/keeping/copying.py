"""Copies the kept folders of this node's members to the head, as their files change.

Each folder has a task that looks at it every few seconds. All of them share one window: so many
pieces may be on their way to the head, so that reports and output always find room on the link. A
copy that breaks off begins again when there is a link, for as long as the node has the file.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shoal.machine.enduring import enduring
from shoal.model.job import MemberRef
from shoal.model.kept import (
    FILES_MAX,
    PATH_PARTS_MAX,
    PIECE_BYTES,
    FileAnswer,
    FilePiece,
    KeptFile,
    Kind,
    Snapshot,
    path_problem,
)

log = logging.getLogger("shoal.agent")

WINDOW_PIECES = 8  # on their way, of all folders together
FILES_AT_ONCE = 8  # of one folder
HANDLES_MAX = 256  # files of a snapshot that are held open while they are copied
LOOK_S = 2.0
LOOK_FACTOR = 20  # a look that takes long is repeated less often
ANSWER_S_MAX = 30.0  # without an answer, a copy begins again
COPY_REST = 4  # a file that changes all the time is copied for a fifth of the time
AGAIN_S = 2.0

Message = FilePiece | Snapshot


class Broken(Exception):
    """A copy that did not end; it is tried again."""


class Transfer:
    """A file or snapshot on its way. `out`: pieces that were not answered."""

    def __init__(self, size: int, folder: Folder | None = None) -> None:
        self.size = size
        self.folder = folder
        self.out = 0
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(_looked_at)


class Folder:
    """A kept folder of a job on this node. `kept`: its files as the head has them; a file that the
    head refuses is there, too. `clean_at`: everything that was there at that time is kept."""

    def __init__(self, job: str, kind: Kind, root: Path, user: int | None) -> None:
        self.job = job
        self.kind = kind
        self.root = root
        self.user = user
        self.refs: dict[MemberRef, float | None] = {}  # when each ended
        self.kept: dict[str, Stamp] = {}
        self.refused: set[str] = set()
        self.noted: set[str] = set()
        self.rests: dict[str, float] = {}  # files that are not copied again before this time
        self.before: Found | None = None  # the last look
        self.unsettled = False  # files were copied or went, and the head has no snapshot of it yet
        self.clean_at = 0.0
        self.moved_at = time.monotonic()  # something was answered
        self.poked = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def ref(self) -> MemberRef:
        """In whose name the files are sent: the newest attempt's."""
        return max(self.refs, key=lambda ref: (ref.attempt, -ref.member))

    @property
    def ending(self) -> bool:
        return all(ended is not None for ended in self.refs.values())


class Copying:
    """`send` returns whether there is a link; what it takes may still get lost."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._folders: dict[tuple[str, Kind], Folder] = {}
        self._window = asyncio.Semaphore(WINDOW_PIECES)
        self._transfers: dict[int, Transfer] = {}
        self._serials = itertools.count(time.time_ns())  # never twice, not even in another life

    # -- folders ---------------------------------------------------------------------------

    def watch(
        self, ref: MemberRef, kind: Kind, root: Path, user: int | None, *, over: bool = False
    ) -> None:
        """From now on. `user`: files of others are not read. `over`: the member has ended."""
        key = ref.job, kind
        folder = self._folders.get(key)
        if folder is None:
            folder = self._folders[key] = Folder(ref.job, kind, root, user)
            work = self._follow
            folder.task = asyncio.create_task(
                enduring(f"the copying of {root}", lambda: work(folder))
            )
        folder.refs[ref] = time.monotonic() if over else None
        folder.clean_at = 0.0

    def fetched(self, ref: MemberRef, kind: Kind, files: dict[str, Stamp]) -> None:
        """These came from the head just now."""
        folder = self._folders.get((ref.job, kind))
        if folder is not None:
            folder.kept.update(files)

    def ended(self, ref: MemberRef) -> None:
        """Its process is over: look once more. An empty folder needs no second look."""
        for folder in self._of(ref):
            folder.refs[ref] = time.monotonic()
            if not folder.kept and _empty(folder.root):
                folder.clean_at = time.monotonic()
            folder.poked.set()

    def complete(self, ref: MemberRef, kinds: tuple[Kind, ...] = tuple(Kind)) -> bool:
        """Is everything kept that was there when the member ended?"""
        for folder in self._of(ref):
            ended = folder.refs[ref]
            if folder.kind in kinds and (ended is None or folder.clean_at < ended):
                return False
        return True

    def moved_at(self, ref: MemberRef) -> float:
        """When a file of its folders was last kept, or a piece of one."""
        return max((folder.moved_at for folder in self._of(ref)), default=0.0)

    def forget(self, ref: MemberRef) -> list[Path]:
        """Returns output folders that no member needs any more."""
        gone = []
        for folder in self._of(ref):
            del folder.refs[ref]
            if not folder.refs:
                del self._folders[folder.job, folder.kind]
                if folder.task is not None:
                    folder.task.cancel()
                if folder.kind is Kind.OUTPUT:
                    gone.append(folder.root)
        return gone

    def _of(self, ref: MemberRef) -> list[Folder]:
        found = (self._folders.get((ref.job, kind)) for kind in Kind)
        return [folder for folder in found if folder is not None and ref in folder.refs]

    # -- the link --------------------------------------------------------------------------

    def disconnected(self) -> None:
        for serial in list(self._transfers):
            self._end(serial, "there is no link")

    def reconnected(self) -> None:
        for folder in self._folders.values():
            folder.poked.set()

    def take(self, answer: FileAnswer) -> None:
        transfer = self._transfers.get(answer.serial)
        if transfer is None:
            return
        if answer.kept and transfer.folder is not None:
            transfer.folder.moved_at = time.monotonic()
        if transfer.out:
            transfer.out -= 1
            self._window.release()
        if answer.lost and transfer.folder is not None:
            transfer.folder.kept.clear()
        if answer.problem:
            self._end(answer.serial, answer.problem, again=answer.again)
        elif answer.kept >= transfer.size and not transfer.out:
            self._end(answer.serial)

    def _end(self, serial: int, problem: str = "", *, again: bool = True) -> None:
        transfer = self._transfers.pop(serial)
        for _ in range(transfer.out):
            self._window.release()
        if transfer.done.done():
            return
        if problem and again:
            transfer.done.set_exception(Broken(problem))
        else:
            transfer.done.set_result(problem)

    # -- one folder ------------------------------------------------------------------------

    async def _follow(self, folder: Folder) -> None:
        while True:
            began = time.monotonic()
            try:
                await self._look(folder)
                wait_s = max(LOOK_S, LOOK_FACTOR * (time.monotonic() - began))
            except (Broken, OSError) as error:
                log.debug("%s of %s is not kept yet: %s", folder.kind, folder.job, error)
                wait_s = AGAIN_S
            try:
                async with asyncio.timeout(min(wait_s, 60.0)):
                    await folder.poked.wait()
            except TimeoutError:
                pass
            folder.poked.clear()

    async def _look(self, folder: Folder) -> None:
        began = time.monotonic()
        try:
            found = await asyncio.to_thread(scan, folder.root, folder.user)
        except FileNotFoundError:
            found = Found({}, {})
        ending, before, folder.before = folder.ending, folder.before, found
        changed = {p: stamp for p, stamp in found.files.items() if folder.kept.get(p) != stamp}
        if folder.kind is Kind.CHECKPOINT:
            # Nobody can write it any more when all its members have ended.
            if ending or (at_rest(before, found) and folder.rests.get("", 0.0) <= began):
                await self._snapshot(folder, found, changed)
            else:
                return
        else:
            if not ending:
                changed = {p: s for p, s in changed.items() if folder.rests.get(p, 0.0) <= began}
            await self._files(folder, found, changed)
        if changed:
            folder.poked.set()  # look again at once: what has changed meanwhile?
            folder.clean_at = 0.0
        elif all(folder.kept.get(path) == stamp for path, stamp in found.files.items()):
            folder.clean_at = began

    async def _files(self, folder: Folder, found: Found, changed: dict[str, Stamp]) -> None:
        """An output: each file for itself."""
        for path in [path for path in folder.kept if path not in found.files]:
            await self._remove(folder, path)
        for path, why in found.notes.items():
            await self._note(folder, path, why)
        await self._copy_all(folder, changed)

    async def _snapshot(self, folder: Folder, found: Found, changed: dict[str, Stamp]) -> None:
        """Checkpoints: all files together, as they are now."""
        began = time.monotonic()
        gone = [path for path in folder.kept if path not in found.files]
        folder.unsettled |= bool(changed or gone)
        handles = {}
        if len(changed) <= HANDLES_MAX:
            handles = await asyncio.to_thread(open_all, folder.root, changed, folder.user)
        try:
            await self._copy_all(folder, changed, handles)
        finally:
            for handle in handles.values():
                os.close(handle)
        for path in gone:
            folder.kept.pop(path, None)
            folder.refused.discard(path)
        if folder.unsettled and not folder.refused:
            await self._settle(folder, found)
        folder.unsettled = False
        now = time.monotonic()
        folder.rests[""] = now + COPY_REST * (now - began)

    async def _copy_all(
        self, folder: Folder, changed: dict[str, Stamp], handles: dict[str, int] | None = None
    ) -> None:
        """Small files first: they are results that somebody waits for."""
        order = sorted(changed, key=lambda path: changed[path].size)
        for start in range(0, len(order), FILES_AT_ONCE):
            copies = [
                self._copy(folder, path, changed[path], (handles or {}).get(path))
                for path in order[start : start + FILES_AT_ONCE]
            ]
            for error in await asyncio.gather(*copies, return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error

    async def _copy(
        self, folder: Folder, path: str, stamp: Stamp, opened: int | None = None
    ) -> None:
        """Raises Broken or OSError if it has to be tried again."""
        began = time.monotonic()
        serial, transfer = self._begin(stamp.size, folder)
        handle = -1 if opened is None else opened
        try:
            if opened is None:
                handle = await asyncio.to_thread(open_file, folder.root, path, folder.user)
            await self._pieces(folder, path, stamp, handle, serial, transfer)
            problem = await self._answered(transfer)
            if folder.kind is Kind.CHECKPOINT and stamp_of(handle) != stamp:
                raise Broken(f"{path} has changed")
        except FileNotFoundError:
            return  # it has just gone; the next look knows
        finally:
            if opened is None and handle >= 0:
                os.close(handle)
            if serial in self._transfers:
                self._end(serial, "given up")
        folder.kept[path] = stamp
        folder.moved_at = time.monotonic()
        folder.rests[path] = folder.moved_at + COPY_REST * (folder.moved_at - began)
        (folder.refused.add if problem else folder.refused.discard)(path)

    async def _pieces(
        self, folder: Folder, path: str, stamp: Stamp, handle: int, serial: int, transfer: Transfer
    ) -> None:
        offset = 0
        while offset < stamp.size or not offset:
            await self._room()
            length = min(PIECE_BYTES, stamp.size - offset)
            try:
                data = await asyncio.to_thread(os.pread, handle, length, offset)
                if len(data) < length:
                    raise Broken(f"{path} became shorter")
            except BaseException:
                self._window.release()
                raise
            if transfer.done.done():  # refused, or the link is gone
                self._window.release()
                return
            transfer.out += 1
            modified_ms = stamp.modified_ns // 1_000_000
            piece = FilePiece(
                folder.ref, folder.kind, path, serial, stamp.size, offset, data, modified_ms
            )
            if not self._send(piece):
                raise Broken("there is no link")
            offset += len(data)
            if not stamp.size:
                return

    async def _room(self) -> None:
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                await self._window.acquire()
        except TimeoutError:
            raise Broken("the head does not answer") from None

    def _begin(self, size: int, folder: Folder | None = None) -> tuple[int, Transfer]:
        serial = next(self._serials)
        transfer = self._transfers[serial] = Transfer(size, folder)
        return serial, transfer

    async def _answered(self, transfer: Transfer) -> str:
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await asyncio.shield(transfer.done)
        except TimeoutError:
            raise Broken("the head does not answer") from None

    async def _tell(self, folder: Folder, make: Callable[[int], Message]) -> str:
        """A message without data; returns the head's problem with it."""
        serial, transfer = self._begin(0, folder)
        try:
            if not self._send(make(serial)):
                raise Broken("there is no link")
            return await self._answered(transfer)
        finally:
            if serial in self._transfers:
                self._end(serial, "given up")

    async def _remove(self, folder: Folder, path: str) -> None:
        if path not in folder.refused:
            await self._tell(
                folder, lambda serial: FilePiece(folder.ref, folder.kind, path, serial, size=-1)
            )
        folder.kept.pop(path, None)
        folder.rests.pop(path, None)
        folder.refused.discard(path)

    async def _note(self, folder: Folder, path: str, why: str) -> None:
        if path in folder.noted:
            return
        shown = path.encode(errors="replace").decode()[:200]
        await self._tell(
            folder,
            lambda serial: FilePiece(folder.ref, folder.kind, shown, serial, size=0, why=why),
        )
        folder.noted.add(path)

    async def _settle(self, folder: Folder, found: Found) -> None:
        """Every file of this look has been copied, so they count together. Without one that was
        refused, they would not be a checkpoint."""
        files = tuple(
            KeptFile(path, stamp.size, stamp.modified_ns // 1_000_000)
            for path, stamp in sorted(found.files.items())
        )
        await self._tell(folder, lambda serial: Snapshot(folder.ref, serial, files))


def _empty(root: Path) -> bool:
    try:
        with os.scandir(root) as entries:
            return next(entries, None) is None
    except OSError:
        return True


def _looked_at(future: asyncio.Future[str]) -> None:
    _ = future.cancelled() or future.exception()


# What is in a kept folder. A tenant may write there and the agent may be root, so no link is
# followed, and no file of another user is read.


NOTES_MAX = 20  # files that are left out, and named


class Stamp(NamedTuple):
    """A file with another stamp has changed."""

    size: int
    modified_ns: int
    inode: int


class Found(NamedTuple):
    files: dict[str, Stamp]
    notes: dict[str, str]  # files that cannot be kept, and why


def scan(root: Path, user: int | None = None) -> Found:
    """`user`: only files of this user. OSError if the folder itself cannot be read."""
    found = Found({}, {})
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _walk(handle, "", user, found, 1)
    finally:
        os.close(handle)
    return found


def _walk(folder: int, inside: str, user: int | None, found: Found, depth: int) -> None:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            path = f"{inside}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if depth >= PATH_PARTS_MAX:
                    _note(found, path, "it is too deep")
                    continue
                try:
                    inner = _open(entry.name, folder, os.O_DIRECTORY)
                except OSError:
                    continue  # it has just gone
                try:
                    _walk(inner, f"{path}/", user, found, depth + 1)
                finally:
                    os.close(inner)
                continue
            try:
                seen = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            why = _problem(path, seen, user)
            if not why and len(found.files) >= FILES_MAX:
                why = f"only {FILES_MAX:,} files are kept"
            if why:
                _note(found, path, why)
            else:
                found.files[path] = Stamp(seen.st_size, seen.st_mtime_ns, seen.st_ino)


def _problem(path: str, seen: os.stat_result, user: int | None) -> str:
    if stat.S_ISLNK(seen.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISREG(seen.st_mode):
        return "it is not a regular file"
    if user is not None and seen.st_uid != user:
        return "it belongs to another user"
    return path_problem(path)


def _note(found: Found, path: str, why: str) -> None:
    if len(found.notes) < NOTES_MAX:
        found.notes[path] = why


def _open(name: str, folder: int, flags: int = 0) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=folder)


def open_folder(root: Path, path: str) -> tuple[int, str]:
    """A descriptor of the folder that holds this file, and the file's name in it. No link is
    followed on the way."""
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    *folders, name = path.split("/")
    for folder in folders:
        try:
            inner = _open(folder, here, os.O_DIRECTORY)
        finally:
            os.close(here)
        here = inner
    return here, name


def open_file(root: Path, path: str, user: int | None = None) -> int:
    """A descriptor of this file, reached without following a link."""
    folder, name = open_folder(root, path)
    try:
        handle = _open(name, folder)
    finally:
        os.close(folder)
    seen = os.fstat(handle)
    if not stat.S_ISREG(seen.st_mode) or (user is not None and seen.st_uid != user):
        os.close(handle)
        raise PermissionError(f"{path} is no longer a file of its own")
    return handle


def open_all(root: Path, files: dict[str, Stamp], user: int | None = None) -> dict[str, int]:
    """Descriptors of all these files at one moment: whoever replaces one of them later does not
    change what is read. OSError if one of them has changed already."""
    handles: dict[str, int] = {}
    try:
        for path, stamp in files.items():
            handles[path] = open_file(root, path, user)
            if stamp_of(handles[path]) != stamp:
                raise OSError(f"{path} is being written")
    except BaseException:
        for handle in handles.values():
            os.close(handle)
        raise
    return handles


def at_rest(before: Found | None, found: Found) -> bool:
    """Is nothing in the folder half written? A file that was there, and is as it was, is whole. So
    is one that was replaced, because that is done by renaming. A new one may still grow."""
    if before is None:
        return False
    for path, stamp in found.files.items():
        known = before.files.get(path)
        if known is None or (known != stamp and known.inode == stamp.inode):
            return False
    return True


def stamp_of(handle: int) -> Stamp:
    seen = os.fstat(handle)
    return Stamp(seen.st_size, seen.st_mtime_ns, seen.st_ino)
