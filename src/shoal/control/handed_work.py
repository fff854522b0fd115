"""Saved work of jobs that neighbors hand over. It comes before its job does, file by file, and the
job begins with it as if it had saved it here.

    outputs/.handed/TENANT/MARK/files/PATH    what has come
    outputs/.handed/TENANT/MARK/whole.json    the list of files, once all of them are there
    outputs/.handed/TENANT/MARK/adopted.json  the same, once they are the job's: nothing comes twice

A transfer that broke goes on where it was. MARK is the hand-over's, as in the job's label.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

import msgspec

from shoal.control.kept_files import files_in, stats_of
from shoal.control.outputs import ADOPTED, FILES, HANDED, WHOLE, OutputStore
from shoal.machine.files import sync_folder
from shoal.machine.paths import ask
from shoal.model.durations import DAY_MS
from shoal.model.kept import FILES_MAX, FilePart, KeptFile, path_problem
from shoal.model.neighbor import marked

WAITING_MAX = 256  # hand-overs of one tenant whose jobs have not come
LEFT_MS = DAY_MS  # nothing came for so long: its job will not come either


class NotTaken(Exception):
    """Why this cluster does not take it."""


class HandedWork:
    """For threads: all of it may wait for a disk."""

    def __init__(self, store: OutputStore) -> None:
        self._store = store
        self._root = store.root / HANDED
        self._lock = threading.Lock()  # a part may come again while it is written

    def folder(self, tenant: str, mark: str) -> Path:
        """`tenant`: the key of one. NotTaken if the mark is none."""
        if marked(mark) is None:
            raise NotTaken(f"{mark[:80]!r} is no hand-over")
        return self._root / tenant / mark

    def come(self, tenant: str, mark: str) -> list[KeptFile]:
        """What is here; the last one may not be whole."""
        folder = self.folder(tenant, mark)
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode((folder / ADOPTED).read_bytes(), type=list[KeptFile])
        files = folder / FILES
        return stats_of({path: files / path for path in files_in(files)})

    def write(self, tenant: str, mark: str, part: FilePart, bound: int) -> int:
        """How many bytes of the file are here now. `bound`: for all files of the job."""
        folder = self.folder(tenant, mark)
        if wrong := path_problem(part.path):
            raise NotTaken(wrong)
        size, end = part.size, part.offset + len(part.data)
        if not 0 <= part.offset <= end <= size or not 0 <= part.modified_ms < 1 << 53:
            raise NotTaken("says what cannot be")
        with self._lock:
            if not part.offset:
                self._refuse_too_much(folder, part.path, size, bound)
            return self._put(folder, part)

    def _put(self, folder: Path, part: FilePart) -> int:
        """Bytes of this version that are here are not written again, so a late repetition of a
        part harms nothing."""
        place = folder / FILES / part.path
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(place, flags, 0o600), "r+b") as file:
            seen, end = os.fstat(file.fileno()), part.offset + len(part.data)
            same = seen.st_mtime_ns == part.modified_ms * 1_000_000
            here = seen.st_size if same else 0
            if part.offset > here or 0 < end <= here:
                return here
            file.truncate(part.offset)
            file.seek(part.offset)
            file.write(part.data)
            file.flush()
            os.fsync(file.fileno())
            os.utime(file.fileno(), ns=(part.modified_ms * 1_000_000,) * 2)
        os.utime(folder)
        return end

    def _refuse_too_much(self, folder: Path, path: str, size: int, bound: int) -> None:
        files = folder / FILES
        here = {one.path: one.size for one in stats_of({p: files / p for p in files_in(files)})}
        if sum(here.values()) - here.get(path, 0) + size > bound or len(here) > FILES_MAX:
            raise NotTaken(f"more than the {bound >> 20} MiB that may travel here")
        limits = self._store.limits
        free = shutil.disk_usage(self._store.root).free
        if self._store.total + size > limits.total or free < size + limits.spare:
            raise NotTaken("the head's disk has no room for it now")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        waiting = sorted(folder.parent.iterdir(), key=lambda one: one.stat().st_mtime)
        for left in waiting[: max(0, len(waiting) - WAITING_MAX)]:
            shutil.rmtree(left, ignore_errors=True)

    def settle(self, tenant: str, mark: str, files: list[KeptFile]) -> None:
        """These are all of them."""
        folder = self.folder(tenant, mark)
        here = {one.path: one for one in self.come(tenant, mark)}
        adopted = (folder / ADOPTED).exists()
        missing = next((one.path for one in files if here.get(one.path) != one), "")
        if missing or not files:
            raise NotTaken(f"not all of it has come: {missing or 'there is no file'}")
        if adopted:
            return
        with contextlib.suppress(FileNotFoundError):
            for path in here.keys() - {one.path for one in files}:
                (folder / FILES / path).unlink()
        new = folder / f"{WHOLE}.new"
        with new.open("wb") as file:
            file.write(msgspec.json.encode(files))
            file.flush()
            os.fsync(file.fileno())
        new.replace(folder / WHOLE)
        sync_folder(folder)

    def waits(self, tenant: str, mark: str) -> bool:
        """For a loop, too. OSError: nobody knows now."""
        if marked(mark) is None:
            return False
        place = self._root / tenant / mark / WHOLE
        return ask((str(self._store.root),), place.exists)

    def sweep(self, now_ms: int) -> None:
        """Work whose job never came."""
        for folder in self._root.glob("*/*"):
            with contextlib.suppress(OSError):
                if now_ms - folder.stat().st_mtime_ns // 1_000_000 > LEFT_MS:
                    shutil.rmtree(folder, ignore_errors=True)
