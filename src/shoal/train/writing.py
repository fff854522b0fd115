"""Runs torch.distributed.checkpoint over fsspec and computes checksums while writing."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.train.checkpoints import PART_BYTES, CheckpointStore, FileSum, reason
from shoal.train.errors import TrainError

# A warning at each save of a run with one member, where it is intended.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


def write(state: Any, store: CheckpointStore, name: str, side: Any) -> dict[str, FileSum]:
    """Writes this member's part; returns the checksums of its files. Every member calls it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    # An object store has nothing to sync; `sync_files` would sync the whole machine.
    writer = FsspecWriter(store.address(name), sync_files=store.local)
    disk = _summing_disk(writer.fs.fs)
    writer.fs = disk
    try:
        dcp.save(state, storage_writer=writer, process_group=side, no_dist=side is None)
    except dcp.api.CheckpointException as error:
        raise TrainError(f"cannot save into {store.url}: {_first(error)}") from None
    sums: dict[str, FileSum] = disk.sums
    return sums


def read(state: Any, store: CheckpointStore, name: str, side: Any) -> None:
    """Fills the tensors and values of `state`. Every member calls it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    reader = FsspecReader(store.address(name))
    try:
        dcp.load(state, storage_reader=reader, process_group=side, no_dist=side is None)
    except dcp.api.CheckpointException as error:
        raise TrainError(
            f"{store.address(name)} does not fit the state to restore: {_first(error)}"
        ) from None


def _first(error: Any) -> str:
    """The reason on the first member that failed."""
    for rank, (cause, _) in sorted(error.failures.items()):
        while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
            cause = cause.__cause__
        return f"{reason(cause)} (member {rank})"
    return reason(error)


class Summing(io.IOBase):
    """A write-only file that computes checksums as it is written."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._parts = hashlib.sha256()
        self._part = hashlib.sha256()
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._raw.write(data)
        view = memoryview(data).cast("B")
        size = view.nbytes
        while view:
            taken = min(len(view), PART_BYTES - self._size % PART_BYTES)
            self._part.update(view[:taken])
            self._size += taken
            view = view[taken:]
            if not self._size % PART_BYTES:
                self._end_part()
        return size

    def _end_part(self) -> None:
        self._parts.update(self._part.digest())
        self._part = hashlib.sha256()

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        """Used only to sync the file, so the buffer is flushed first."""
        self._raw.flush()
        return int(self._raw.fileno())

    def sum(self) -> FileSum:
        if self._size % PART_BYTES:
            self._end_part()
        return FileSum(self._size, self._parts.hexdigest())


def _summing_disk(fs: Any) -> Any:
    """Made in a function, because its base class is torch's, which is imported late."""
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

    class SummingDisk(FileSystem):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fs = fs
            self.sums: dict[str, FileSum] = {}

        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
            with super().create_stream(path, mode) as stream:
                summing = Summing(stream)
                yield summing
            self.sums[_name(path)] = summing.sum()

        def rename(self, path: Any, new_path: Any) -> None:
            super().rename(path, new_path)
            self.sums[_name(new_path)] = self.sums.pop(_name(path))

    return SummingDisk()


def _name(path: Any) -> str:
    return str(os.path.basename(os.fspath(path)))
