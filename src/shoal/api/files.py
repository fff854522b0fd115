"""The files that jobs have kept: listed, and read piece by piece."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from shoal.api.audit import quiet
from shoal.api.handling import aside, handles
from shoal.api.http import Request
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.calls.jobs import JobCalls
from shoal.control.filedesk import FileDesk, NotGiven
from shoal.control.handed_work import HandedWork, NotTaken
from shoal.control.kept_files import Copy, Index
from shoal.control.loop import ControlLoop
from shoal.control.outputs import OutputStore
from shoal.control.secretstore import SecretError, files_key
from shoal.link.sealed_files import clear_size
from shoal.machine.paths import MOUNTS
from shoal.model.blocks import BLOCK_BYTES
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import Phase
from shoal.model.kept import (
    PATH_BYTES_MAX,
    FileKey,
    FilePart,
    FilesView,
    HandedFiles,
    KeptFile,
    Kind,
    Received,
    held_key,
)

PART_BYTES = 4 << 20
HEAD = ""  # as the name of whoever fetches: no node has it
OFFSET_MAX = 2**53 - 1

T = TypeVar("T")

RelPath = Annotated[str, Meta(max_length=PATH_BYTES_MAX)]


class Files:
    @handles(JobCalls.files)
    async def listing(
        self, reach: Reach, job_id: str, path: RelPath = "", folder: Kind = Kind.OUTPUT
    ) -> FilesView:
        job, store = reach.job(job_id), _store(reach)
        files, notes, index = await _asked(
            store, lambda: (store.listing(job.id, folder), store.notes(job.id), store.index(job.id))
        )
        top = path.strip("/")
        if top:
            files = [one for one in files if one.path == top or one.path.startswith(f"{top}/")]
        if job.spec.encrypt:
            files = [replace(one, size=clear_size(one.size)) for one in files]
        return FilesView(
            job=job.id,
            files=files,
            total_bytes=sum(one.size for one in files),
            notes=[reach.text(note) for note in notes],
            live=job.phase is not Phase.FINISHED,
            encrypted=job.spec.encrypt,
            held_by=held_by(index) if folder is Kind.CHECKPOINT else [],
        )

    @handles(JobCalls.file_part)
    async def part(
        self,
        reach: Reach,
        job_id: str,
        path: RelPath,
        offset: Annotated[int, Meta(ge=0, le=OFFSET_MAX)] = 0,
        folder: Kind = Kind.OUTPUT,
    ) -> FilePart:
        job, store = reach.job(job_id), _store(reach)
        try:
            part = await part_of(reach.loop, store, job.id, path, offset, folder)
            return replace(part, encrypted=True) if job.spec.encrypt else part
        except NotGiven as problem:
            raise Refusal(503, str(problem), "path") from None
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            message = f"{job.id} has kept no file {path[:100]!r}; see: shoal ls {job.id}"
            raise Refusal(404, message, "path") from None

    @handles(JobCalls.file_key)
    async def key(self, reach: Reach, job_id: str) -> FileKey:
        job, secrets = reach.job(job_id), reach.loop.secrets
        if not job.spec.encrypt or secrets is None:
            raise Refusal(404, f"the files of {job.id} are not encrypted", "job")
        try:
            identity = reach.loop.state.identity
            return FileKey(job=job.id, key=await aside(lambda: files_key(secrets, identity, job)))
        except SecretError as error:
            raise Refusal(422, f"cannot read the key of its files: {error}", "job") from None


HANDED_BYTES_MAX = 8 << 20  # of one part, as JSON


class Handed:
    """Saved work of jobs that a neighbor is about to hand over."""

    @handles(JobCalls.handed)
    async def come(self, reach: Reach, mark: str) -> FilesView:
        files = await self._done(reach, lambda work, owner: work.come(owner, mark))
        return FilesView(job="", files=files, total_bytes=sum(one.size for one in files))

    @handles(JobCalls.hand_part, body_max=HANDED_BYTES_MAX)
    async def part(self, request: Request, reach: Reach, mark: str, data: FilePart) -> Received:
        bound = reach.loop.policy.checkpoint_copy_mb << 20
        wrote = await self._done(reach, lambda work, owner: work.write(owner, mark, data, bound))
        quiet(request.scope)  # the last call has a line in the audit log, for all of it
        return Received(kept=wrote)

    @handles(JobCalls.hand_files)
    async def settle(self, reach: Reach, mark: str, data: HandedFiles) -> Received:
        await self._done(reach, lambda work, owner: work.settle(owner, mark, data.files))
        return Received(kept=sum(one.size for one in data.files))

    async def _done(self, reach: Reach, work: Callable[[HandedWork, str], T]) -> T:
        if reach.tenant == EVERY_TENANT:
            raise Refusal(422, "is for neighbors, which are users of one tenant", "mark")
        desk, owner = _desk(reach), reach.loop.state.identity.key(reach.tenant)
        try:
            return await _asked(desk.store, lambda: work(desk.handed, owner))
        except NotTaken as problem:
            raise Refusal(422, f"cannot take its saved work: {problem}") from None
        except OSError as error:
            raise Refusal(507, f"cannot keep its saved work: {error.strerror}") from None


async def part_of(
    loop: ControlLoop, store: OutputStore, job: str, path: str, offset: int, kind: Kind
) -> FilePart:
    held = None
    if kind is Kind.CHECKPOINT:
        held = await _asked(store, lambda: find(store, job, path))
    if held is not None:
        return await aside(lambda: _from_nodes(loop, store, job, *held, offset))
    return await _asked(store, lambda: _read(store, job, path, offset, kind))


async def _asked(store: OutputStore, work: Callable[[], T]) -> T:
    """In a thread of the mount, if the folder is on one: a pool would be full while it hangs."""
    mount = MOUNTS.of(str(store.root))
    return await (aside(work) if mount is None else mount.beside(work))


def _read(store: OutputStore, job: str, path: str, offset: int, kind: Kind) -> FilePart:
    handle = store.open(job, path, kind)
    try:
        seen = os.fstat(handle)
        data = os.pread(handle, PART_BYTES, offset)
    finally:
        os.close(handle)
    return FilePart(
        path=path,
        offset=offset,
        size=seen.st_size,
        modified_ms=seen.st_mtime_ns // 1_000_000,
        version=f"{seen.st_ino:x}.{seen.st_mtime_ns:x}.{seen.st_size:x}",
        data=data,
    )


def held_by(index: Index) -> list[str]:
    return sorted({node for copy in index.held.values() for node in copy.holders})


def find(store: OutputStore, job: str, path: str) -> tuple[Copy, KeptFile] | None:
    """A checkpoint file that nodes hold, and the head does not."""
    index = store.index(job)
    for node, copy in index.held.items():
        for file in index.of[node]:
            if file.path == path:
                return copy, file
    return None


def _from_nodes(
    loop: ControlLoop, store: OutputStore, job: str, copy: Copy, file: KeptFile, offset: int
) -> FilePart:
    """One block, from a node that holds it."""
    from shoal.agent.blocks.fetch import Line
    from shoal.agent.blocks.fetch import NotGiven as NotSent

    manifest = store.manifest(job, copy)
    layout, problems = manifest.layout, []
    number = next(n for n, (path, _) in enumerate(layout.files) if path == file.path)
    data, start = b"", offset - offset % BLOCK_BYTES
    blocks = layout.blocks(number)
    if offset < file.size:
        block = blocks[start // BLOCK_BYTES]
        for node in copy.holders:
            peer = loop.blocks.peer(node, held_key(job, copy.manifest), HEAD)
            try:
                if peer is not None:
                    line = Line(peer, HEAD)
                    try:
                        size = layout.span(block).size
                        data = line.block(block, size, manifest.hashes()[block])
                    finally:
                        line.close()
                    break
            except NotSent as problem:
                problems.append(str(problem))
        else:
            there = "; ".join(problems) or f"{', '.join(copy.holders)} cannot be reached"
            raise NotGiven(f"no node that holds it gives it now: {there}")
    return FilePart(
        path=file.path,
        offset=offset,
        size=file.size,
        modified_ms=file.modified_ms,
        version=f"{copy.manifest[:16]}.{file.modified_ms:x}",
        data=data[offset - start :],
    )


def _desk(reach: Reach) -> FileDesk:
    desk = reach.loop.files
    if not isinstance(desk, FileDesk):
        raise Refusal(404, "this controller keeps no files of jobs")
    return desk


def _store(reach: Reach) -> OutputStore:
    return _desk(reach).store
