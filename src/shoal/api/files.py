"""The files that jobs have kept: listed, and read piece by piece."""

from __future__ import annotations

import os
from typing import Annotated

from litestar import Controller
from litestar.exceptions import HTTPException
from litestar.params import Parameter

from shoal.api.handling import aside, handles
from shoal.api.problems import Refusal
from shoal.api.reach import Reach
from shoal.calls.jobs import JobCalls
from shoal.control.filedesk import FileDesk
from shoal.control.outputs import OutputStore
from shoal.model.job import Phase
from shoal.model.kept import PATH_BYTES_MAX, FilePart, FilesView, Kind

PART_BYTES = 4 << 20
OFFSET_MAX = 2**53 - 1

RelPath = Annotated[str, Parameter(max_length=PATH_BYTES_MAX)]


class Files(Controller):
    @handles(JobCalls.files)
    async def listing(
        self, reach: Reach, job_id: str, path: RelPath = "", folder: Kind = Kind.OUTPUT
    ) -> FilesView:
        job, store = reach.job(job_id), _store(reach)
        files = await aside(lambda: store.listing(job.id, folder))
        top = path.strip("/")
        if top:
            files = [one for one in files if one.path == top or one.path.startswith(f"{top}/")]
        return FilesView(
            job=job.id,
            files=files,
            total_bytes=sum(one.size for one in files),
            notes=[reach.text(note) for note in store.notes(job.id)],
            live=job.phase is not Phase.FINISHED,
        )

    @handles(JobCalls.file_part)
    async def part(
        self,
        reach: Reach,
        job_id: str,
        path: RelPath,
        offset: Annotated[int, Parameter(ge=0, le=OFFSET_MAX)] = 0,
        folder: Kind = Kind.OUTPUT,
    ) -> FilePart:
        job, store = reach.job(job_id), _store(reach)
        try:
            return await aside(lambda: _read(store, job.id, path, offset, folder))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            message = f"{job.id} has kept no file {path[:100]!r}; see: shoal ls {job.id}"
            raise Refusal(404, message, "path") from None


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


def _store(reach: Reach) -> OutputStore:
    desk = reach.loop.files
    if not isinstance(desk, FileDesk):
        raise HTTPException("this controller keeps no files of jobs", status_code=404)
    return desk.store
