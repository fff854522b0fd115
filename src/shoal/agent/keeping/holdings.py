"""Copies of checkpoints that this node holds for others to fetch: of its own jobs, and of peers.

    held/JOB/MANIFEST/files/PATH   files as they were at one moment
    held/JOB/MANIFEST/manifest     what each of their blocks hashes to
    held/JOB/MANIFEST/tenant

The name of a copy is that of its manifest. A node stages what its own job has saved: links to the
files, or encrypted copies. Another node gets them through the door, and answers when they are on
its disk. Both stay until the head names another copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from shoal.agent.blocks.doorkeeper import Doorkeeper
from shoal.agent.blocks.store import FILES, MANIFEST, Holding, Offer
from shoal.agent.keeping.contents import Stamp, open_all, open_file, stamp_of
from shoal.link.sealed_files import SealedFile
from shoal.model.blocks import (
    BLOCK_BYTES,
    BadManifest,
    FileBlocks,
    Manifest,
    Peer,
    decode_manifest,
    encode_manifest,
)
from shoal.model.kept import CopyHeld, HoldCopy, Kind, held_key

log = logging.getLogger("shoal.agent")

HANDLES_MAX = 256  # files that are held open while they are copied
SPARE_BYTES = 1 << 30  # of the disk, which members and outputs need
TELL_S = 1.0
TENANT, FRESH = "tenant", ".fresh"


class CannotHold(Exception):
    """Why this node does not hold a copy."""


class Holdings:
    """`tell` reports to the head, if there is a link."""

    def __init__(
        self, root: Path, own: str, doors: Doorkeeper, tell: Callable[[CopyHeld], object]
    ) -> None:
        self._root = root
        self._own = own
        self._doors = doors
        self._tell = tell
        self._staged: dict[str, tuple[str, dict[str, tuple[Stamp, FileBlocks]]]] = {}
        self._fetches: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._removing: set[asyncio.Future[None]] = set()

    def recall(self) -> None:
        """At the start: copies of an earlier life are offered again, and what it left half done is
        removed."""
        whole = {self._root / job / name for job, name in self._copies()}
        _remove([one for one in self._root.glob("*/*") if one not in whole])
        for job, name in self._copies():
            self._offer(job, name)

    def reconnected(self) -> None:
        """The head says which of them it no longer wants."""
        for job, name in self._copies():
            self._tell(CopyHeld(job, name))

    # -- own jobs --------------------------------------------------------------------------

    async def stage(
        self,
        job: str,
        tenant: str,
        root: str,
        files: dict[str, Stamp],
        user: int | None,
        key: bytes | None,
    ) -> bytes:
        """Its manifest. OSError if a file is being written."""
        name, data = await asyncio.to_thread(self._stage, job, tenant, root, files, user, key)
        self._offer(job, name)
        return data

    def _stage(
        self,
        job: str,
        tenant: str,
        root: str,
        files: dict[str, Stamp],
        user: int | None,
        key: bytes | None,
    ) -> tuple[str, bytes]:
        fresh = self._root / job / FRESH
        shutil.rmtree(fresh, ignore_errors=True)
        (fresh / FILES).mkdir(mode=0o700, parents=True)
        before, known = self._staged.get(job, ("", {}))
        found: dict[str, tuple[Stamp, FileBlocks]] = {}
        changed = {p: stamp for p, stamp in files.items() if known.get(p, (None,))[0] != stamp}
        # All at one moment: whoever replaces one of them later does not change what is read.
        handles = open_all(root, changed, user) if len(changed) <= HANDLES_MAX else {}
        try:
            for path, stamp in sorted(files.items()):
                target = fresh / FILES / path
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path not in changed:
                    os.link(self._root / job / before / FILES / path, target)
                    found[path] = known[path]
                    continue
                if path not in handles:
                    handles[path] = open_file(root, path, user)
                sealed = SealedFile(key, job, Kind.CHECKPOINT, path, stamp.size) if key else None
                _put(handles[path], target, sealed)
                found[path] = stamp, _hashed(target, path)
                if stamp_of(handles[path]) != stamp:
                    raise OSError(f"{path} is being written")
                os.close(handles.pop(path))
        except FileNotFoundError:  # somebody has removed the copy before this one
            self._staged.pop(job, None)
            raise
        finally:
            for handle in handles.values():
                os.close(handle)
        data, name = encode_manifest(Manifest(tuple(blocks for _, blocks in found.values())))
        (fresh / MANIFEST).write_bytes(data)
        (fresh / TENANT).write_text(tenant)
        place = self._root / job / name
        shutil.rmtree(place, ignore_errors=True)
        fresh.rename(place)
        self._staged[job] = name, found
        return name, data

    # -- as the head wants it --------------------------------------------------------------

    def take(self, order: HoldCopy) -> None:
        if not order.manifest:
            self._keep_only(order.job, order.keep)
        elif (order.job, order.manifest) not in self._fetches:
            key = order.job, order.manifest
            self._fetches[key] = task = asyncio.create_task(self._hold(order))
            task.add_done_callback(lambda _: self._fetches.pop(key))

    def _keep_only(self, job: str, names: Iterable[str]) -> None:
        gone = []
        for _, other in self._copies(job):
            if other not in names and (job, other) not in self._fetches:
                self._doors.offer(Offer(key=held_key(job, other)))
                gone.append(self._root / job / other)
                (gone[-1] / TENANT).unlink()
        removing = asyncio.ensure_future(asyncio.to_thread(_remove, gone))
        self._removing.add(removing)
        removing.add_done_callback(self._removing.discard)

    async def _hold(self, order: HoldCopy) -> None:
        fetching = asyncio.create_task(asyncio.to_thread(self._fetch, order))
        while not (await asyncio.wait([fetching], timeout=TELL_S))[0]:
            self._tell(CopyHeld(order.job, order.manifest, got=self._bytes(order)))
        problem = ""
        try:
            fetching.result()
            self._offer(order.job, order.manifest)
        except (CannotHold, BadManifest, OSError) as error:
            problem = f"{self._own}: {error}"
            log.warning("cannot hold a checkpoint of %s: %s", order.job, error)
            shutil.rmtree(self._root / order.job / order.manifest, ignore_errors=True)
        self._tell(CopyHeld(order.job, order.manifest, problem=problem))

    def _fetch(self, order: HoldCopy) -> None:
        if self._used(order) + order.size > order.bound:
            raise CannotHold(f"{order.tenant} has its share of the disk for checkpoints there")
        self._root.mkdir(mode=0o700, exist_ok=True)
        if shutil.disk_usage(self._root).free < order.size + SPARE_BYTES:
            raise CannotHold("the disk has no room for it")
        folder = self._root / order.job / order.manifest
        get(folder, order.manifest, order.peers, self._own, order.size).close()
        (folder / TENANT).write_text(order.tenant)
        _sync(folder)

    # -- how -------------------------------------------------------------------------------

    def _offer(self, job: str, name: str) -> None:
        folder = self._root / job / name
        manifest = str(folder / MANIFEST)
        self._doors.offer(
            Offer(key=held_key(job, name), folder=str(folder / FILES), manifest=manifest)
        )

    def _copies(self, job: str = "") -> list[tuple[str, str]]:
        """Those that are whole."""
        found = self._root.glob(f"{job or '*'}/*/{TENANT}")
        return [(one.parent.parent.name, one.parent.name) for one in found]

    def _used(self, order: HoldCopy) -> int:
        """What its tenant has here, apart from own jobs, of which these are links. A newer copy of
        a job takes the place of the one before it."""
        others = [one for one in self._copies() if one[0] not in (order.job, *self._staged)]
        return sum(
            decode_manifest((folder / MANIFEST).read_bytes()).layout.size
            for folder in (self._root / job / name for job, name in others)
            if (folder / TENANT).read_text() == order.tenant
        )

    def _bytes(self, order: HoldCopy) -> int:
        total = 0
        for here, _, names in os.walk(self._root / order.job / order.manifest):
            for name in names:
                with contextlib.suppress(OSError):
                    total += os.lstat(os.path.join(here, name)).st_size
        return total


class Part(Holding):
    """Of which only some files are wanted."""

    wanted: frozenset[str] | None = None

    def missing(self) -> list[int]:
        files = self.layout.files
        return [
            number
            for number in super().missing()
            if self.wanted is None or files[self.layout.span(number).file][0] in self.wanted
        ]


def get(
    folder: Path,
    name: str,
    peers: tuple[Peer, ...],
    own: str,
    size: int,
    wanted: Iterable[str] | None = None,
) -> Holding:
    """All files of this copy or those that are wanted, from nodes that hold it. Each block is
    compared with its hash."""
    from shoal.agent.blocks.fetch import fetch_manifest, gather

    manifest = fetch_manifest(peers, name, own)
    if manifest.layout.size != size:
        raise CannotHold("its manifest has another size than was announced")
    holding = Part(folder, manifest.layout, mark=name)
    holding.wanted = None if wanted is None else frozenset(wanted)
    problems = gather(holding, manifest, peers, own)
    if problems:
        holding.close()
        raise CannotHold("; ".join(problems))
    if wanted is None:
        holding.manifest()
    return holding


def _put(handle: int, target: Path, sealed: SealedFile | None) -> None:
    """What the open file has, under another name: a link where that is enough."""
    if sealed is None:
        with contextlib.suppress(OSError):
            os.link(f"/proc/self/fd/{handle}", target, follow_symlinks=True)
            return
    with target.open("wb") as file:
        if sealed is None:
            offset = 0
            while data := os.pread(handle, BLOCK_BYTES, offset):
                file.write(data)
                offset += len(data)
            return
        try:
            for chunk in range(sealed.last + 1):
                file.write(sealed.seal(handle, chunk))
        except EOFError:
            raise OSError("it became shorter") from None


def _hashed(file: Path, path: str) -> FileBlocks:
    hashes, size = [], 0
    with file.open("rb") as opened:
        while data := opened.read(BLOCK_BYTES):
            hashes.append(hashlib.sha256(data).digest())
            size += len(data)
    return FileBlocks(path, size, b"".join(hashes))


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # the job's, if that was all


def _sync(folder: Path) -> None:
    """So that it survives a loss of power, from which a second copy is to protect."""
    for here, _, names in os.walk(folder):
        for name in names:
            handle = os.open(os.path.join(here, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
