"""Copies the kept folders of this node's members to the head, as their files change.

Each folder has a task that looks at it every few seconds. All of them share one window: so many
pieces may be on their way to the head, so that reports and output always find room on the link. A
copy that breaks off begins again when there is a link, for as long as the node has the file.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import time
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from shoal.agent.keeping.contents import (
    Found,
    Stamp,
    at_rest,
    open_all,
    open_file,
    scan,
    stamp_of,
)
from shoal.agent.keeping.holdings import Holdings
from shoal.link.sealed_files import SealedFile, sealed_size
from shoal.machine.enduring import enduring
from shoal.machine.paths import ask, asked, close
from shoal.machine.spares import Spares
from shoal.model.job import MemberRef
from shoal.model.kept import (
    COUNTED,
    NO_PEER,
    PIECE_BYTES,
    FileAnswer,
    FilePiece,
    KeptFile,
    Kind,
    Snapshot,
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
HEAD_S = 60.0  # a folder that no other node can hold goes through the head for so long
MS = 1_000_000  # in ns

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

    def __init__(self, job: str, kind: Kind, root: str, user: int | None) -> None:
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
        self.peers = ""  # of this tenant: other nodes are to hold it
        self.head_until = 0.0  # but none can, until then
        self.unsettled = False  # files were copied or went, and the head has no snapshot of it yet
        self.clean_at = 0.0
        self.moved_at = time.monotonic()  # something was answered
        self.poked = asyncio.Event()
        self.task: asyncio.Task[None] | asyncio.TimerHandle | None = None

    @property
    def ref(self) -> MemberRef:
        """In whose name the files are sent: the newest attempt's."""
        return max(self.refs, key=lambda ref: (ref.attempt, -ref.member))

    @property
    def ending(self) -> bool:
        return all(ended is not None for ended in self.refs.values())


class Copying:
    """`send` returns whether there is a link; what it takes may still get lost."""

    def __init__(
        self,
        send: Callable[[Message], bool],
        spares: Spares | None = None,
        key_of: Callable[[MemberRef], bytes | None] = lambda _: None,
        holdings: Holdings | None = None,
    ) -> None:
        self._send = send
        self._holdings = holdings
        self._spares = spares
        self._key_of = key_of
        self._folders: dict[str, list[Folder]] = {}  # by job
        self._window = asyncio.Semaphore(WINDOW_PIECES)
        self._transfers: dict[int, Transfer] = {}
        self._serials = itertools.count(time.time_ns())  # never twice, not even in another life

    # -- folders ---------------------------------------------------------------------------

    def watch(
        self,
        ref: MemberRef,
        kind: Kind,
        root: str,
        user: int | None,
        *,
        over: bool = False,
        peers: str = "",
    ) -> None:
        """From now on. `user`: files of others are not read. `over`: the member has ended. `peers`:
        other nodes are to hold it, for this tenant."""
        folder = self._folder(ref.job, kind)
        if folder is None:
            folder = Folder(ref.job, kind, root, user)
            self._folders.setdefault(ref.job, []).append(folder)
            if kind is Kind.OUTPUT and not over:  # most keep nothing, and end before the first look
                loop = asyncio.get_running_loop()
                folder.task = loop.call_later(LOOK_S, self._begin_to_follow, folder)
            else:
                self._begin_to_follow(folder)
        folder.refs[ref] = time.monotonic() if over else None
        folder.peers = peers
        folder.clean_at = 0.0

    def _begin_to_follow(self, folder: Folder) -> None:
        if isinstance(folder.task, asyncio.TimerHandle):
            folder.task.cancel()
        follow = self._follow
        what = f"the copying of {folder.root}"
        folder.task = asyncio.create_task(enduring(what, lambda: follow(folder)))

    def fetched(self, ref: MemberRef, kind: Kind, files: dict[str, Stamp]) -> None:
        """These came from the head just now."""
        folder = self._folder(ref.job, kind)
        if folder is not None:
            folder.kept.update(files)

    def ended(self, ref: MemberRef, *, alone: bool = False) -> None:
        """Its process is over: look once more. An empty folder needs no second look. `alone`:
        nobody has it open."""
        for folder in self._of(ref):
            folder.refs[ref] = time.monotonic()
            waits = isinstance(folder.task, asyncio.TimerHandle)
            if not folder.kept and self._empty(folder, alone=alone):
                folder.clean_at = time.monotonic()
                if waits:
                    continue
            if waits:
                self._begin_to_follow(folder)
            folder.poked.set()

    def _empty(self, folder: Folder, *, alone: bool) -> bool:
        """An output folder that nobody uses any more goes at once if it is."""
        try:
            if folder.kind is not Kind.OUTPUT or not folder.ending:
                return not ask((folder.root,), os.listdir, folder.root)
            alone = alone and len(folder.refs) == 1 and self._spares is not None
            if not (alone and self._spares and self._spares.take(folder.root, folder.user or 0)):
                os.rmdir(folder.root)
        except OSError as error:
            return error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ETIMEDOUT)
        return True

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

    def forget(self, ref: MemberRef) -> list[str]:
        """Returns output folders that no member needs any more."""
        gone = []
        for folder in self._of(ref):
            del folder.refs[ref]
            if not folder.refs:
                self._drop(folder)
                if folder.task is not None:
                    folder.task.cancel()
                if folder.kind is Kind.OUTPUT:
                    gone.append(folder.root)
        return gone

    def _of(self, ref: MemberRef) -> list[Folder]:
        return [folder for folder in self._folders.get(ref.job, ()) if ref in folder.refs]

    def _folder(self, job: str, kind: Kind) -> Folder | None:
        for folder in self._folders.get(job, ()):
            if folder.kind is kind:
                return folder
        return None

    def _drop(self, folder: Folder) -> None:
        others = self._folders[folder.job]
        others.remove(folder)
        if not others:
            del self._folders[folder.job]

    # -- the link --------------------------------------------------------------------------

    def disconnected(self) -> None:
        for serial in list(self._transfers):
            self._end(serial, "there is no link")

    def reconnected(self) -> None:
        for folders in self._folders.values():
            for folder in folders:
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
            found = await asked(folder.root, scan, folder.root, folder.user)
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
        if folder.unsettled and folder.peers and folder.head_until < began:
            if await self._to_peers(folder, found):
                folder.unsettled = False
                folder.rests[""] = time.monotonic() + COPY_REST * (time.monotonic() - began)
                return
            folder.kept.clear()  # the head has none of it
            changed.update(found.files)
        handles = {}
        if len(changed) <= HANDLES_MAX:
            handles = await asked(folder.root, open_all, folder.root, changed, folder.user)
        try:
            await self._copy_all(folder, changed, handles)
        finally:
            close(folder.root, *handles.values())
        for path in gone:
            folder.kept.pop(path, None)
            folder.refused.discard(path)
        if folder.unsettled and not folder.refused:
            await self._settle(folder, found)
        folder.unsettled = False
        now = time.monotonic()
        folder.rests[""] = now + COPY_REST * (now - began)

    async def _to_peers(self, folder: Folder, found: Found) -> bool:
        """False: it goes through the head."""
        assert self._holdings is not None
        key = self._key_of(folder.ref)
        try:
            manifest = await self._holdings.stage(
                folder.job, folder.peers, folder.root, found.files, folder.user, key
            )
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            folder.head_until = time.monotonic() + HEAD_S
            return False
        serial, transfer = self._begin(COUNTED, folder)
        try:
            snapshot = Snapshot(folder.ref, serial, self._listed(folder, found), manifest)
            if not self._send(snapshot):
                raise Broken("there is no link")
            problem = await self._answered(transfer, patient=True)
        finally:
            if serial in self._transfers:
                self._end(serial, "given up")
        if problem == NO_PEER:
            folder.head_until = time.monotonic() + HEAD_S
            return False
        folder.kept = dict(found.files)
        folder.moved_at = time.monotonic()
        return True

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
        key = self._key_of(folder.ref)
        if key == b"":
            await self._note(folder, path, "its node restarted, and the key to encrypt it is gone")
            folder.kept[path] = stamp
            folder.refused.add(path)
            return
        sealed = SealedFile(key, folder.job, folder.kind, path, stamp.size) if key else None
        size = sealed_size(stamp.size) if key else stamp.size
        serial, transfer = self._begin(size, folder)
        handle = -1 if opened is None else opened
        try:
            if opened is None:
                handle = await asked(folder.root, open_file, folder.root, path, folder.user)
            read = partial(sealed.seal if sealed else _read, handle)
            first = FilePiece(
                folder.ref, folder.kind, path, serial, size, modified_ms=stamp.modified_ns // MS
            )
            await self._pieces(first, read, transfer)
            problem = await self._answered(transfer)
            if (
                folder.kind is Kind.CHECKPOINT
                and await asked(folder.root, stamp_of, handle) != stamp
            ):
                raise Broken(f"{path} has changed")
        except FileNotFoundError:
            return  # it has just gone; the next look knows
        finally:
            if opened is None and handle >= 0:
                close(folder.root, handle)
            if serial in self._transfers:
                self._end(serial, "given up")
        folder.kept[path] = stamp
        folder.moved_at = time.monotonic()
        folder.rests[path] = folder.moved_at + COPY_REST * (folder.moved_at - began)
        (folder.refused.add if problem else folder.refused.discard)(path)

    async def _pieces(
        self, piece: FilePiece, read: Callable[[int], bytes], transfer: Transfer
    ) -> None:
        root = transfer.folder.root if transfer.folder is not None else ""
        for number in range(max(1, -(-piece.size // PIECE_BYTES))):
            await self._room()
            offset = number * PIECE_BYTES
            try:
                data = await asked(root, read, number)
                if len(data) < min(PIECE_BYTES, piece.size - offset):
                    raise EOFError
            except EOFError:
                self._window.release()
                raise Broken(f"{piece.path} became shorter") from None
            except BaseException:
                self._window.release()
                raise
            if transfer.done.done():  # refused, or the link is gone
                self._window.release()
                return
            transfer.out += 1
            data = data[: piece.size - offset]
            if not self._send(replace(piece, offset=offset, data=data)):
                raise Broken("there is no link")

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

    async def _answered(self, transfer: Transfer, *, patient: bool = False) -> str:
        """`patient`: for as long as it moves on."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_S_MAX):
                    return await asyncio.shield(transfer.done)
            except TimeoutError:
                still = time.monotonic() - (transfer.folder.moved_at if transfer.folder else 0.0)
                if not patient or still > ANSWER_S_MAX:
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
        files = self._listed(folder, found)
        await self._tell(folder, lambda serial: Snapshot(folder.ref, serial, files))

    def _listed(self, folder: Folder, found: Found) -> tuple[KeptFile, ...]:
        size_of = sealed_size if self._key_of(folder.ref) else int
        return tuple(
            KeptFile(path, size_of(stamp.size), stamp.modified_ns // MS)
            for path, stamp in sorted(found.files.items())
        )


def _read(handle: int, piece: int) -> bytes:
    return os.pread(handle, PIECE_BYTES, piece * PIECE_BYTES)


def _looked_at(future: asyncio.Future[str]) -> None:
    _ = future.cancelled() or future.exception()
