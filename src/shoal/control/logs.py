"""The members' output as the controller keeps it, so that logs outlive nodes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from shoal.model.job import MemberRef
from shoal.model.report import LogChunk

# A member that prints without end must not fill the controller's disk.
LOG_BYTES_MAX = 256 * 1024 * 1024
CUT_NOTICE = b"\n[shoal: the output is longer than 256 MiB; the rest is not kept]\n"
READ_BYTES_MAX = 256 * 1024


class LogStore:
    def __init__(self, root: Path) -> None:
        self._root = root

    def append(self, chunk: LogChunk) -> int:
        """Returns how many bytes are kept; a piece beyond that leaves a gap and is not taken."""
        path = self._path(chunk.ref)
        size = path.stat().st_size if path.exists() else 0
        end = chunk.offset + len(chunk.data)
        if chunk.data and chunk.offset >= LOG_BYTES_MAX:
            return end  # counted as kept, so that the job can end
        if chunk.offset > size or not chunk.data:
            return size
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(handle, chunk.data, chunk.offset)
            if end >= LOG_BYTES_MAX:
                os.pwrite(handle, CUT_NOTICE, end)
        finally:
            os.close(handle)
        return max(size, end)

    def read(self, ref: MemberRef, offset: int) -> tuple[int, bytes, int]:
        """From `offset` on (negative: from the end): the true offset, the bytes, the size."""
        try:
            handle = os.open(self._path(ref), os.O_RDONLY)
        except FileNotFoundError:
            return 0, b"", 0
        try:
            size = os.fstat(handle).st_size
            start = max(0, size + offset) if offset < 0 else min(offset, size)
            return start, os.pread(handle, READ_BYTES_MAX, start), size
        finally:
            os.close(handle)

    def drop(self, job_id: str) -> None:
        shutil.rmtree(self._root / job_id, ignore_errors=True)

    def _path(self, ref: MemberRef) -> Path:
        return self._root / ref.job / f"{ref.attempt}.{ref.member}.log"
