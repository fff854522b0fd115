"""Saves checkpoints beside the training: the loop waits only while the state is copied."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from shoal.train.checkpoints import (
    PART_BYTES,
    CheckpointStore,
    Damage,
    FileSum,
    Found,
    Manifest,
    State,
    collect,
    frozen,
    put_back,
    reason,
)
from shoal.train.errors import TrainError, Unsaved, say
from shoal.train.group import Group
from shoal.train.waits import StepTimes, clock_ns

T = TypeVar("T")

END_WAIT_S = 3600.0  # for the last save, at the end of the script
END_AFTER_ERROR_S = 5.0  # after an error: the other members may be gone
AGAIN_S = (1.0, 10.0)  # before a save that failed is tried again, unless the loop waits for it


class Copy(NamedTuple):
    """A copied state and the name of its checkpoint."""

    name: str
    staged: Any


class Saver:
    """One save at a time. One that fails is tried again; after that the run goes on without it.
    Other errors that occurred while writing are raised by the next call. What fails on one member
    fails on all of them."""

    def __init__(self, store: CheckpointStore, group: Group, keep: int, times: StepTimes) -> None:
        self._store, self._group, self._keep, self._times = store, group, keep, times
        self._thread: threading.Thread | None = None
        self._error: TrainError | None = None
        self._awaited = threading.Event()  # the loop waits for the save
        self.failed = 0  # saves in a row
        self._stager: Any = None
        self.looked = False  # whether earlier checkpoints have been looked at
        self.written_s = 0.0  # total duration of the last save
        self._prepare()

    def copy(self, state: State, step: int) -> Copy | None:
        """The part that blocks the loop: waits for the previous save and copies the state. None:
        the directory does not answer."""
        self.finish()
        try:
            if not self.looked:
                self._together(self._refuse_to_overwrite)
                self.looked = True
            name = self._together(lambda: self._store.new_name(step))
        except Unsaved as error:
            self._failed(step, error)
            return None
        return Copy(name, self._stage(frozen(collect(state))))

    def write(self, copy: Copy, manifest: Manifest, saved: Callable[[Manifest], None]) -> None:
        """Writes in a thread, and calls `saved` there when the checkpoint is whole."""
        began = clock_ns()

        def work() -> None:
            self._times.leave_out_this_thread()
            try:
                whole = self._tried(copy, manifest)
                self.written_s = (clock_ns() - began) / 1e9
                self.failed = 0
                self._error = None
                saved(whole)
            except Unsaved as error:
                self._failed(manifest.step, error)
            except TrainError as error:
                self._error = error
            except Exception as error:
                text = f"the save of step {manifest.step} failed: {reason(error)}"
                self._error = TrainError(text)

        self._awaited.clear()
        self._thread = threading.Thread(target=work, name="shoal-save", daemon=True)
        self._thread.start()

    def finish(self, timeout_s: float | None = None, *, last: bool = False) -> None:
        """Waits for the current save. The `last` one of a run has to be there."""
        if self._thread is not None:
            if not last:
                self._awaited.set()
            self._thread.join(timeout_s)
            if not self._thread.is_alive():
                self._thread = None
        if self._error is not None and (last or not isinstance(self._error, Unsaved)):
            error, self._error = self._error, None
            raise error

    def restore(self, state: State, seed: int) -> Manifest | None:
        """Loads the newest checkpoint that is whole and undamaged, the same on every member."""
        self.finish()
        self.looked = True
        found = [one for one in self._together(self._store.find) if one.whole]
        for one in found:
            try:
                manifest = self._verified(one)
            except Damage as damage:
                self._say(f"{one.name} is damaged and will not be used: {damage}")
                if self._group.rank == 0:
                    self._store.set_aside(one.name)
                continue
            if manifest.seed != seed:
                raise TrainError(
                    f"seed {seed} is not the seed {manifest.seed} of {one.name}: "
                    "the order of the samples would change"
                )
            collected = collect(state)
            read(collected, self._store, one.name, self._group.side)
            put_back(state, collected)
            self._say(f"continues with step {manifest.step} from {one.name}")
            return msgspec.structs.replace(manifest, restarts=manifest.restarts + 1)
        if found:
            raise TrainError(
                f"all {len(found)} checkpoints in {self._store.url} are damaged; "
                "nothing was removed; to start over, choose another directory"
            )
        return None

    # -- helpers, in call order ------------------------------------------------------------

    def _failed(self, step: int, error: Unsaved) -> None:
        self.failed += 1
        self._error = error
        self._say(f"step {step} is not saved, and the run goes on: {error}")

    def _tried(self, copy: Copy, manifest: Manifest) -> Manifest:
        """Again after a while, all members together: rank 0 decides."""
        for pause_s in AGAIN_S:
            try:
                return self._write(copy, manifest)
            except Unsaved as error:
                if self._group.agree(self._awaited.wait(pause_s) if not self._group.rank else None):
                    raise
                self._say(f"saves step {manifest.step} again: {error}")
        return self._write(copy, manifest)

    def _prepare(self) -> None:
        probe = self._together(self._store.probe)
        seen = self._group.gather(self._store.sees(probe))
        if self._group.rank == 0:
            self._store.remove_probe(probe)
        if not all(seen):
            raise TrainError(
                f"checkpoint directory {self._store.url} is not the same for member "
                f"{seen.index(False)} as for member 0: use a shared directory or s3://..."
            )

    def _together(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0. An error there ends every member with the same line."""
        result: T | None = None
        error, unsaved = "", False
        if self._group.rank == 0:
            try:
                result = work()
            except TrainError as problem:
                error = str(problem)
            except Exception as problem:
                error, unsaved = f"checkpoint directory {self._store.url}: {reason(problem)}", True
        result, error, unsaved = self._group.agree((result, error, unsaved))
        if error:
            raise Unsaved(error) if unsaved else TrainError(error)
        return cast(T, result)

    def _refuse_to_overwrite(self) -> None:
        if any(one.whole for one in self._store.find()):
            raise TrainError(
                f"{self._store.url} already has checkpoints: call ctx.restore(state) before the "
                "first ctx.save(state), or choose another directory"
            )

    def _stage(self, collected: State) -> Any:
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        if self._stager is None:
            # On a GPU, reusing pinned memory makes the copy several times as fast.
            on_gpu = self._group.device.type == "cuda"
            self._stager = BlockingAsyncStager(cache_staged_state_dict=on_gpu)
        return self._stager.stage(collected)

    def _write(self, copy: Copy, manifest: Manifest) -> Manifest:
        """Runs in the saver's thread, on every member at the same time."""
        group, store = self._group, self._store
        try:
            sums = write(copy.staged, store, copy.name, group.side)
        except Unsaved:
            if group.rank == 0:
                store.remove(copy.name)  # an incomplete checkpoint only takes up space
            raise
        parts = group.gather((manifest.step, sums))
        steps = {step for step, _ in parts}
        if len(steps) > 1:
            raise TrainError(f"members saved different steps ({min(steps)} to {max(steps)})")
        whole = msgspec.structs.replace(
            manifest, files={file: one for _, sums in parts for file, one in sums.items()}
        )
        error = ""
        if group.rank == 0:
            try:
                store.write_manifest(copy.name, whole)
                store.prune(self._keep)
            except Exception as problem:
                error = f"cannot save into {store.url}: {reason(problem)}"
        error = group.agree(error)
        if error:
            raise Unsaved(error)
        return whole

    def _verified(self, one: Found) -> Manifest:
        """Each member verifies its share of the files; all learn of any damage."""
        group = self._group
        damage = error = ""
        manifest, damage = self._together(lambda: self._manifest(one))
        if manifest is None:
            raise Damage(damage)
        names = sorted(manifest.files)[group.rank :: group.world]
        try:
            self._store.verify(one.name, {name: manifest.files[name] for name in names})
        except Damage as problem:
            damage = str(problem)
        except Exception as problem:
            error = f"{self._store.address(one.name)} cannot be read: {reason(problem)}"
        heard = group.gather((damage, error))
        for _, text in heard:
            if text:
                raise TrainError(text)
        for text, _ in heard:
            if text:
                raise Damage(text)
        return manifest

    def _manifest(self, one: Found) -> tuple[Manifest | None, str]:
        try:
            return self._store.manifest(one.name), ""
        except Damage as damage:
            return None, str(damage)

    def _say(self, text: str) -> None:
        if self._group.rank == 0:
            say(text)


# Runs torch.distributed.checkpoint over fsspec and computes checksums while writing.


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
        raise Unsaved(f"cannot save into {store.url}: {_first(error)}") from None
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
