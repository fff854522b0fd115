"""Puts a backup into a home, so that the next `shoal up` goes on from there.

Nobody knows what was given out after the backup was made: job numbers, attempts, epochs, orders.
The restored log skips as many of them as could have been given out. So nodes obey the restored
head, and what they still run is never taken for something new.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.control.backup.manifest import (
    PARTS,
    PIECE_BYTES,
    BackupError,
    Manifest,
    Progress,
    opened,
    sync_folder,
    verify,
)
from shoal.control.backup.saving import is_saved
from shoal.control.home import Home
from shoal.control.lifecycle import is_up
from shoal.control.store.marks import Marks, Numbers
from shoal.control.store.sqlite import SqliteStore
from shoal.core.invariants import Violation
from shoal.core.invariants import verify as verify_state
from shoal.core.state.events.cluster import ClusterRestored
from shoal.machine.files import AGENT_LOCK, STARTER_LOCK, held, lock, write_private
from shoal.ports import StoreError

STAGING = ".restore-"
# What a head may give out: at first, and for every second (attempts of a job: minute) since the
# backup. A head starts a few times a minute at most, and takes some hundred jobs a second at most,
# but not for hours.
EPOCHS, EPOCHS_A_SECOND = 1_000, 10
JOBS, JOBS_A_SECOND = 100_000, 100
ATTEMPTS, ATTEMPTS_A_MINUTE = 10, 1
ORDERS, ORDERS_A_SECOND = 1_000, 1


class Restored(msgspec.Struct, frozen=True):
    """`aside`: where the files are that were replaced; None: there were none."""

    manifest: Manifest
    first_job: int
    aside: Path | None
    left_out: tuple[str, ...]  # links that lead out of the home


def restore(path: Path, home: Home, *, replace: bool, progress: Progress) -> Restored:
    """All of it, or nothing: until everything is verified, the home is left alone."""
    try:
        manifest = verify(path, progress)
        old = _look_at(home, manifest, replace=replace)
        home.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(home):
            staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=home.path))
            try:
                left_out = _extract(path, staging, progress)
                first_job = _go_on(staging, home, manifest, old)
                aside = _put_in_place(home, staging, path, same=old is not None)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except StoreError as error:
        raise BackupError(f"{path} cannot be put back: {error}") from None
    except Violation as error:
        raise BackupError(f"{path} cannot be put back, it contradicts itself: {error}") from None
    except OSError as error:
        raise BackupError(
            f"nothing was restored: {error.filename or home.path}: {error.strerror}"
        ) from None
    return Restored(manifest, first_job, aside, left_out)


def store_of(path: Path, home: Home, folder: Path, progress: Progress) -> Path:
    """The event log of a backup of this cluster, in a folder."""
    manifest = verify(path, progress)
    if manifest.cluster != home.cluster_id():
        raise BackupError(f"{path} is a backup of another cluster, {manifest.cluster}")
    with opened(path) as (archive, found, _):
        for info in found:
            if info.name == home.database.name and _put(archive, info, folder):
                return folder / info.name
    raise BackupError(f"{path} holds no events")


def _look_at(home: Home, manifest: Manifest, *, replace: bool) -> Marks | None:
    """The marks of the home, if it is of the same cluster. Refuses a home that is in use."""
    if is_up(home):
        raise BackupError(f"a cluster is up in {home.path}; first: shoal down")
    if not home.path.exists() or not any(home.path.iterdir()):
        return None
    if not replace:
        raise BackupError(
            f"{home.path} is not empty: use another --home, or --replace, which puts what is there "
            "aside"
        )
    folders = list(home.nodes.iterdir()) if home.nodes.is_dir() else []
    if any(held(folder / STARTER_LOCK) for folder in folders):
        raise BackupError(f"{home.path} is a node of another cluster; first: shoal leave")
    alive = any(held(folder / AGENT_LOCK) for folder in folders)
    named = home.id.read_text().strip() if home.id.exists() else ""
    if named == manifest.cluster or (alive and not named):
        return Numbers(home.marks).written
    if alive:
        raise BackupError(f"nodes of another cluster run in {home.path}; first: shoal down")
    return None


@contextlib.contextmanager
def _locked(home: Home) -> Iterator[None]:
    """No cluster may come up here meanwhile."""
    holding = lock(home.supervisor_lock)
    if holding is None:
        raise BackupError(f"a cluster is up in {home.path}; first: shoal down")
    try:
        yield
    finally:
        os.close(holding)


def _extract(path: Path, staging: Path, progress: Progress) -> tuple[str, ...]:
    left_out, done = [], 0
    with opened(path) as (archive, found, manifest):
        free = shutil.disk_usage(staging).free
        if manifest.bytes > free:
            raise BackupError(
                f"{path} needs {manifest.bytes >> 20} MiB, and {staging.parent} has "
                f"{free >> 20} MiB left: free some space"
            )
        # Symbolic links last, so that nothing can be written through one.
        for info in sorted(found, key=lambda one: one.issym()):
            if not _put(archive, info, staging):
                left_out.append(info.name)
            done += info.size
            progress("restoring", done, manifest.bytes)
    return tuple(left_out)


def _put(archive: tarfile.TarFile, info: tarfile.TarInfo, staging: Path) -> bool:
    """False: it is not a file, or leads out of the home."""
    if not _is_inside(info.name):
        return False
    target = staging / info.name
    for folder in reversed(target.relative_to(staging).parents):
        (staging / folder).mkdir(mode=0o700, exist_ok=True)
    if info.issym():
        inside = _is_inside(
            os.path.normpath(os.path.join(os.path.dirname(info.name), info.linkname))
        )
        if inside:
            target.symlink_to(info.linkname)
        return inside
    if info.islnk():
        inside = _is_inside(info.linkname) and (staging / info.linkname).is_file()
        if inside:
            os.link(staging / info.linkname, target)
        return inside
    source = archive.extractfile(info)
    if source is None:
        return False
    handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 | info.mode & 0o100)
    with os.fdopen(handle, "wb") as output:
        shutil.copyfileobj(source, output, PIECE_BYTES)
        output.flush()
        os.fsync(output.fileno())
    os.utime(target, (info.mtime, info.mtime))
    return True


def _is_inside(name: str) -> bool:
    return not os.path.isabs(name) and ".." not in name.split("/") and name not in ("", ".")


def _go_on(staging: Path, home: Home, manifest: Manifest, old: Marks | None) -> int:
    """Let the log begin again behind everything that may have been given out. The marks of the same
    home know the job numbers for certain, if they are not older than the backup."""
    place = Home(staging)
    if not place.database.exists():
        return 0
    saved = Numbers(place.marks).written
    numbers = Numbers(place.marks, (home.logs, home.checkpoints, home.outputs))
    store = SqliteStore(place.database, numbers)
    try:
        state, _ = store.load()
        now_ms = max(time.time_ns() // 1_000_000, store.newest_ms())
        since_s = max(0, now_ms - manifest.saved_ms) // 1000
        first_job = state.next_job + JOBS + JOBS_A_SECOND * since_s
        if old is not None and old.job >= saved.job and old.epoch >= state.epoch:
            first_job = old.job
        epoch = max(state.epoch, saved.epoch, old.epoch if old else 0)
        known = saved.both(old) if old else saved
        attempt = max((job.attempt for job in state.jobs.values()), default=0)
        restored = ClusterRestored(
            at_ms=now_ms,
            saved_ms=manifest.saved_ms,
            epoch=epoch + EPOCHS + EPOCHS_A_SECOND * since_s,
            first_job=max(first_job, numbers.left, state.next_job),
            first_attempt=max(
                known.attempt + 1, attempt + ATTEMPTS + ATTEMPTS_A_MINUTE * since_s // 60
            ),
            first_order=max(known.order + 1, state.next_order + ORDERS + ORDERS_A_SECOND * since_s),
        )
        store.commit([restored], [])
        verified, _ = store.load()
        verify_state(verified)
        return restored.first_job
    finally:
        store.close()


def _put_in_place(home: Home, staging: Path, source: Path, *, same: bool) -> Path | None:
    """Files of jobs that are there stay, because those in the backup are not newer; and so does
    what the nodes of this machine have. After a crash in here the cluster does not come up before
    the restore was repeated."""
    write_private(home.restoring, f"{source}\n".encode())
    aside: Path | None = None
    for entry in sorted(home.path.iterdir()):
        replaced = _is_replaced(entry.name) if same else _is_of_cluster(entry.name)
        if replaced and entry != staging:
            if aside is None:
                stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
                aside = Path(tempfile.mkdtemp(prefix=f"replaced-{stamp}-", dir=home.path))
            entry.replace(aside / entry.name)
    for entry in sorted(staging.iterdir()):
        if entry.name in PARTS and (home.path / entry.name).exists():
            _fill(entry, home.path / entry.name)
        else:
            entry.replace(home.path / entry.name)
    sync_folder(home.path)
    home.restoring.unlink()
    return aside


def _is_replaced(name: str) -> bool:
    return is_saved(name) or name.endswith((".db-wal", ".db-shm", ".salvaged")) or name in _OLD


_OLD = ("salvage.txt", "controller.json", "controller.sock")


def _is_of_cluster(name: str) -> bool:
    """Everything but locks, and what earlier restores have left."""
    return not name.startswith((STAGING, "replaced-")) and not name.endswith((".lock", "restoring"))


def _fill(source: Path, target: Path) -> None:
    for folder, folders, files in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir(mode=0o700, exist_ok=True)
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links]:
            if not os.path.lexists(there / name):
                os.rename(os.path.join(folder, name), there / name)
