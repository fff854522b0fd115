"""Makes a backup of a home, while its cluster works or while it is down.

What follows the log (the ledger, notices) is copied before the log, so that its place in the log
is never ahead of it. What the log refers to (secrets, packages, files of jobs) is copied after it,
because it is written before the event that names it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import socket
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import quote

import msgspec

from shoal.control.audit import AUDIT_NAME
from shoal.control.backup.manifest import (
    MANIFEST,
    PARTS,
    BackupError,
    Manifest,
    Member,
    Progress,
    sync_folder,
)
from shoal.control.home import Home
from shoal.control.store.sqlite import SqliteStore
from shoal.core.state.state import State
from shoal.machine.files import held, lock
from shoal.ports import StoreError

# Only of use to the processes that wrote them, or to this machine. A restore leaves them alone.
STAYS = ("nodes", "gateway", "replays", "ray", "spare", "clock.json", "controller.log")
STAYS_TOO = ("controller.json", "controller.sock", "restoring", "salvage.txt", "shoal.db.salvaged")
TEMPORARY = ".shoal-backup-"
LEFTOVER_S = 3600  # a killed backup's folder is removed after this
BUSY_TIMEOUT_S = 30.0
OPCODES = 20_000  # of SQLite between two looks at the progress


def is_saved(name: str) -> bool:
    """Whether a file or folder of the home belongs into every backup."""
    beside = name.startswith((".", "replaced-")) or name.endswith((".lock", "-wal", "-shm"))
    return not beside and ".damaged" not in name and name not in (*STAYS, *STAYS_TOO, *PARTS)


def save(home: Home, target: Path, parts: Sequence[str], progress: Progress) -> Manifest:
    """Write the backup to `target`: all of it, or nothing."""
    folder = target.parent
    try:
        _remove_leftovers(folder)
        work = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder))
    except OSError as error:
        raise BackupError(f"cannot write to {folder}: {error.strerror}") from None
    try:
        holding = lock(work / "lock")
        try:
            manifest = _Saving(home, work, parts, progress).run()
            (work / "tar").replace(target)
            sync_folder(folder)
            return manifest
        finally:
            if holding is not None:
                os.close(holding)
    except (OSError, sqlite3.Error) as error:
        raise _told(folder, error) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _told(folder: Path, error: Exception) -> BackupError:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if full or (isinstance(error, sqlite3.Error) and "full" in str(error)):
        return BackupError(f"the disk of {folder} is full: free some space; no backup was made")
    reason = getattr(error, "strerror", None) or str(error)
    where = getattr(error, "filename", None)
    return BackupError(f"no backup was made: {f'{where}: ' if where else ''}{reason}")


def _remove_leftovers(folder: Path) -> None:
    """Of backups that were killed."""
    for left in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > LEFTOVER_S and not held(left / "lock"):
                shutil.rmtree(left, ignore_errors=True)


class _Counted(io.RawIOBase):
    """Reads as many bytes as the file had when it was opened: it may grow meanwhile. One that has
    become shorter is filled up with zeros."""

    def __init__(self, file: IO[bytes], size: int, look: Callable[[int], None]) -> None:
        self._file, self._left, self._size, self._look = file, size, size, look
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._file.read(wanted)
        data += bytes(wanted - len(data))
        self._left -= len(data)
        self.digest.update(data)
        self._look(self._size - self._left)
        return data


class _Saving:
    def __init__(self, home: Home, work: Path, parts: Sequence[str], progress: Progress) -> None:
        self._home = home
        self._work = work
        self._parts = tuple(part for part in PARTS if part in parts)
        self._progress = progress
        self._members: list[Member] = []
        self._links: dict[tuple[int, int], str] = {}  # files with several names, by inode
        self._bytes = 0

    def run(self) -> Manifest:
        home, state = self._home, State()
        config = home.read_config()
        elsewhere = config.database if config is not None else ""
        manifest = Manifest(
            cluster=home.cluster_id(),
            machine=socket.gethostname(),
            saved_ms=time.time_ns() // 1_000_000,
            parts=self._parts,
            database="PostgreSQL" if elsewhere else "",
        )
        handle = os.open(self._work / "tar", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as output:
            with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
                self._archive = archive
                if not elsewhere:
                    self._add_followers()
                    state, manifest = self._add_log(manifest)
                self._add_audit_log()
                self._add_files()
                for part in self._parts:
                    self._add_tree(home.path / part)
                if "packages" not in self._parts:
                    self._add_packages(packages_of(state))
                manifest = msgspec.structs.replace(manifest, members=tuple(self._members))
                body = msgspec.json.encode(manifest)
                info = tarfile.TarInfo(MANIFEST)
                info.size, info.mode, info.mtime = len(body), 0o600, manifest.saved_ms // 1000
                archive.addfile(info, io.BytesIO(body))
            output.flush()
            os.fsync(output.fileno())
        return manifest

    # -- databases -------------------------------------------------------------------------

    def _add_followers(self) -> None:
        """Databases that follow the log. The cluster does without a damaged one, and so do we."""
        for path in sorted(self._home.path.glob("*.db")):
            if path == self._home.database:
                continue
            try:
                copy = self._copy(path)
            except sqlite3.DatabaseError as error:
                if "full" in str(error):
                    raise
                continue
            self._add_file(copy, path.name)
            copy.unlink()

    def _add_log(self, manifest: Manifest) -> tuple[State, Manifest]:
        path = self._home.database
        if not path.exists():
            raise BackupError(f"there is no {path}, so there is nothing to save")
        salvage = f"see: shoal salvage --home {self._home.path}"
        try:
            copy = self._copy(path)
        except sqlite3.DatabaseError as error:
            if "malformed" in str(error) or "not a database" in str(error):
                raise BackupError(f"{path} is damaged ({error}); {salvage}") from None
            raise
        try:
            store = SqliteStore(copy)
            try:
                state, seq = store.load()  # what cannot be loaded is not worth keeping
                newest_ms = store.newest_ms()
            finally:
                store.close()
        except StoreError as error:
            reason = str(error).partition("(")[2].partition(").")[0] or str(error)
            raise BackupError(f"{path} is damaged ({reason}); {salvage}") from None
        with contextlib.closing(sqlite3.connect(copy)) as counted:
            (finished,) = counted.execute("SELECT count(*) FROM jobs").fetchone()
        self._add_file(copy, path.name)
        copy.unlink()
        return state, msgspec.structs.replace(
            manifest,
            seq=seq,
            newest_ms=newest_ms,
            live_jobs=len(state.jobs),
            finished_jobs=finished,
        )

    def _copy(self, path: Path) -> Path:
        """A consistent copy without free pages. Writers go on meanwhile."""
        copy, size = self._work / path.name, path.stat().st_size

        def look() -> int:
            with contextlib.suppress(FileNotFoundError):
                self._progress(f"copying {path.name}", copy.stat().st_size, size)
            return 0

        source = sqlite3.connect(
            f"file:{quote(str(path))}?mode=rw", uri=True, timeout=BUSY_TIMEOUT_S
        )
        with contextlib.closing(source):
            source.set_progress_handler(look, OPCODES)
            source.execute("VACUUM INTO ?", (str(copy),))
        return copy

    # -- files -----------------------------------------------------------------------------

    def _add_audit_log(self) -> None:
        """The mark first, because it must not say more than the log has. The files are opened
        together, and again if the log was rotated meanwhile."""
        home = self._home.path
        with contextlib.ExitStack() as stack:
            while True:
                files = sorted(home.glob("audit.*"), key=lambda path: path.name != "audit.mark")
                opened = [(path.name, stack.enter_context(path.open("rb"))) for path in files]
                now = {path.name: path.stat().st_ino for path in home.glob("audit.*")}
                seen = {name: os.fstat(file.fileno()).st_ino for name, file in opened}
                if now.get(AUDIT_NAME) == seen.get(AUDIT_NAME):
                    break
            for name, file in opened:
                self._add(name, file)

    def _add_files(self) -> None:
        for path in sorted(self._home.path.iterdir()):
            if is_saved(path.name) and not path.name.startswith("audit.") and path.suffix != ".db":
                if path.is_dir() and not path.is_symlink():
                    self._add_tree(path)
                elif path.is_file():
                    self._add_file(path, path.name)

    def _add_packages(self, names: set[str]) -> None:
        """Those that jobs, services and schedules still need."""
        root = self._home.packages
        for path in [root, *sorted(root.glob("of/*"))] if root.is_dir() else []:
            for name in sorted(names):
                if (path / name).is_file():
                    self._add_file(path / name, str((path / name).relative_to(self._home.path)))

    def _add_tree(self, top: Path) -> None:
        for folder, folders, files in os.walk(top):
            folders.sort()
            links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
            for name in sorted([*files, *links]):
                path = Path(folder, name)
                self._add_file(path, str(path.relative_to(self._home.path)))

    def _add_file(self, path: Path, name: str) -> None:
        """Files may come and go while a cluster works."""
        with contextlib.suppress(FileNotFoundError):
            if path.is_symlink():
                self._add_link(name, tarfile.SYMTYPE, os.readlink(path))
            elif path.is_file():
                with path.open("rb") as file:
                    self._add(name, file)

    def _add(self, name: str, file: IO[bytes]) -> None:
        found = os.fstat(file.fileno())
        inode = (found.st_dev, found.st_ino)
        if found.st_nlink > 1 and inode in self._links:
            self._add_link(name, tarfile.LNKTYPE, self._links[inode])
            return
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = found.st_size, found.st_mode & 0o700, int(found.st_mtime)
        base, self._bytes = self._bytes, self._bytes + info.size
        reader = _Counted(file, info.size, lambda done: self._progress("writing", base + done, 0))
        self._archive.addfile(info, reader)
        self._links[inode] = name
        self._members.append(Member(name, info.size, reader.digest.hexdigest()))

    def _add_link(self, name: str, kind: bytes, to: str) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.mode = kind, to, 0o600
        self._archive.addfile(info)
        self._members.append(Member(name, 0, ""))


def packages_of(state: State) -> set[str]:
    jobs = [job.spec for job in (*state.jobs.values(), *state.arrays.values())]
    jobs += [job.spec for one in state.schedules.values() for job in one.spec.jobs]
    jobs += [one.spec.replica for one in state.services.values()]
    return {spec.package for spec in jobs if spec.package}
