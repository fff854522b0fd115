"""Files of jobs as the head keeps them: outputs, and checkpoints that travel between nodes.

    outputs/JOB/output/PATH       the job's output, file by file
    outputs/JOB/snapshots/N/PATH  files of checkpoints that came with the snapshot N
    outputs/JOB/staged/NODE/PATH  files of the next snapshot
    outputs/JOB/index.json        which of them are the newest snapshot, which another node may
                                  start from; only this file makes one count
    outputs/JOB/manifests/NAME    of checkpoints that nodes hold, and the head does not
    outputs/JOB/notes.json        what is not kept, and why
    outputs/.parts/N/             files on their way
    outputs/.handed/              of jobs of neighbors that have not come: handed_work.py

All writing is done by one thread, so that a slow disk does not stop the loop. A file has its name
only when it is whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.control.kept_files import (
    JOB_FOLDER,
    MANIFESTS,
    SNAPSHOTS,
    Copy,
    Index,
    KeptFiles,
    files_in,
)
from shoal.control.workplace import Workplace
from shoal.link.sealed_files import MAGIC
from shoal.machine.files import sync_folder
from shoal.model.job import MemberRef
from shoal.model.kept import (
    FILES_MAX,
    FileAnswer,
    FilePiece,
    KeptFile,
    Kind,
    Snapshot,
    path_problem,
)

log = logging.getLogger("shoal.outputs")

GIB = 1 << 30
JOB_BYTES_MAX = 20 * GIB  # of one job's output; and as much of its checkpoints
TOTAL_BYTES_MAX = 200 * GIB
SPARE_BYTES = 1 * GIB  # the log of events must always find room on the same disk
WAITING_BYTES_MAX = 64 << 20  # pieces that the thread has not written yet
NOTES_MAX = 20
PARTS, REMOVED, STAGED = ".parts", ".removed", "staged"
HANDED, FILES, WHOLE, ADOPTED = ".handed", "files", "whole.json", "adopted.json"
CHECKPOINT_FOLDERS = (
    SNAPSHOTS,
    STAGED,
    MANIFESTS,
    Kind.CHECKPOINT.value,
)  # the last: of earlier versions
CLEAR = "its node cannot encrypt it; upgrade Shoal there"
FULL = "the head's disk has no room for it now"
BUSY = "the head is busy with other files"

PARTS_MAX = 64  # of one node

Answer = Callable[[FileAnswer], None]
Key = tuple[str, Kind, str]  # job, kind and path


class Limits(NamedTuple):
    job: int = JOB_BYTES_MAX
    total: int = TOTAL_BYTES_MAX
    spare: int = SPARE_BYTES


LIMITS = Limits()


class Kept(NamedTuple):
    """A snapshot that is complete at the head: news for the loop."""

    ref: MemberRef
    files: tuple[KeptFile, ...]


class Missing(Exception):
    """A file of a snapshot is not here, so the node has to send it again."""


class Part(NamedTuple):
    """A file on its way: how many bytes are here, of how many."""

    serial: int
    got: int
    size: int


class Used:
    """What a folder of a job takes."""

    def __init__(self, files: dict[str, int]) -> None:
        self.files = files
        self.size = sum(files.values())

    def put(self, path: str, size: int) -> None:
        self.size += size - self.files.get(path, 0)
        self.files[path] = size

    def drop(self, path: str) -> None:
        self.size -= self.files.pop(path, 0)


class OutputStore(KeptFiles):
    def __init__(self, root: Path, limits: Limits = LIMITS) -> None:
        super().__init__(root)
        self.limits = limits
        self.problem = ""  # why nothing can be written now
        self.total = 0  # at the last look
        self.crowded: frozenset[str] = frozenset()  # live jobs of tenants that have their share
        self.dropped: Callable[[str, Index], None] = lambda *_: None  # checkpoints are gone
        self.encrypts: Callable[[str], bool] = lambda _: False  # did the job ask for it?
        self._writer = ThreadPoolExecutor(1, "shoal-outputs")
        self._waiting = 0
        self._lock = threading.Lock()
        self._used: dict[tuple[str, Kind], Used] = {}
        self._staged: dict[str, int] = {}  # bytes that came since the last snapshot of a job
        self._parts: dict[str, dict[Key, Part]] = {}  # of each node, the oldest first
        self._work = Workplace(root / PARTS)
        shutil.rmtree(root / REMOVED, ignore_errors=True)  # of a controller that was killed

    # -- from nodes ------------------------------------------------------------------------

    def take(self, piece: FilePiece, node: str, *, over: bool, answer: Answer) -> None:
        """`over`: the piece may replace what is here. `answer` is called by the thread."""
        with self._lock:
            busy = self._waiting > WAITING_BYTES_MAX
            self._waiting += len(piece.data)
        if busy:
            self._done(len(piece.data))
            answer(FileAnswer(piece.kind, piece.serial, 0, BUSY, again=True))
            return
        self._writer.submit(self._take, piece, node, over, answer)

    def settle(
        self,
        snapshot: Snapshot,
        node: str,
        bound: int,
        answer: Answer,
        kept: Callable[[Kept], None],
    ) -> None:
        """`bound`: bytes of a job's checkpoints."""
        self._writer.submit(self._settle, snapshot, node, bound, answer, kept)

    def hold(
        self, snapshot: Snapshot, node: str, copy: Copy, done: Callable[[str, bool], None]
    ) -> None:
        """These files of the node count from now on, and are held by others. `done` gets the
        problem with that, and whether to try it again."""
        self._writer.submit(self._hold, snapshot, node, copy, done)

    def _hold(
        self, snapshot: Snapshot, node: str, copy: Copy, done: Callable[[str, bool], None]
    ) -> None:
        job, attempt = snapshot.ref.job, snapshot.ref.attempt
        problem, again = "", False
        try:
            index = self.index(job)
            if attempt < index.attempt:
                raise ValueError("a later attempt has saved something")
            same = index.attempt == attempt
            of = {**(index.of if same else {}), node: list(snapshot.files)}
            held = {**(index.held if same else {}), node: copy}
            elsewhere = {file.path for one in held for file in of[one]}
            at = {p: n for p, n in index.at.items() if p not in elsewhere} if same else {}
            folder = self.root / job / MANIFESTS
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._work.write(folder / copy.manifest, snapshot.manifest)
            self._write_index(job, Index(attempt, of, index.number + 1, at, held))
            wanted = {file.path for files in of.values() for file in files} - elsewhere
            self._sweep(job, wanted, at)
            self._keep_only(folder, {one.manifest for one in held.values()})
        except OSError as error:
            problem, again = f"the head cannot keep its manifest: {error.strerror or error}", True
        except ValueError as error:
            problem = str(error)
        done(problem, again)

    def _done(self, size: int) -> None:
        with self._lock:
            self._waiting -= size

    def _take(self, piece: FilePiece, node: str, over: bool, answer: Answer) -> None:
        kept, problem, again = 0, "", False
        try:
            kept, problem, again = self._write(piece, node, over)
            if not problem:
                self.problem = ""
        except OSError as error:
            problem, again = f"the head cannot keep it: {error.strerror or error}", True
            self.problem = problem
        except Exception:
            log.exception("a piece of %s", piece.ref.job)
            problem = "the head cannot keep it"
        finally:
            self._done(len(piece.data))
        if problem:
            self._drop_part(node, _key(piece))
        answer(FileAnswer(piece.kind, piece.serial, kept, problem, again))

    def _write(self, piece: FilePiece, node: str, over: bool) -> tuple[int, str, bool]:
        if piece.why:
            self._note(piece.ref.job, f"{piece.path}: {piece.why}")
            return 0, "", False
        wrong = path_problem(piece.path)
        if wrong:
            return 0, wrong, False
        place = self._place(piece, node)
        if piece.size < 0:
            self._remove(piece, place, over)
            return 0, "", False
        if not piece.offset:
            refusal, again = self._refusal(piece, place, over)
            if refusal:
                return 0, refusal, again
            self._begin_part(node, piece)
        size, end = piece.size, piece.offset + len(piece.data)
        before = self._parts.get(node, {}).get(_key(piece))
        if before != Part(piece.serial, piece.offset, size) or end > size:
            return 0, "it has to begin again", True  # of an earlier controller, for instance
        part = self._part(node, piece.serial)
        # Without its beginning it cannot become whole: the next controller has removed it.
        create = 0 if piece.offset else os.O_CREAT
        handle = os.open(part, os.O_WRONLY | create, 0o600)
        try:
            _write_all(handle, piece.data, piece.offset)
            if end == size:
                os.ftruncate(handle, size)
                os.utime(handle, ns=(piece.modified_ms * 1_000_000,) * 2)
                os.fsync(handle)
        finally:
            os.close(handle)
        self._parts[node][_key(piece)] = Part(piece.serial, end, size)
        if end == size:
            del self._parts[node][_key(piece)]
            _make_room_for(place, self.root)
            part.replace(place)
            if piece.kind is Kind.OUTPUT:
                self._usage(piece.ref.job, piece.kind).put(piece.path, size)
        return end, "", False

    def _refusal(self, piece: FilePiece, place: Path, over: bool) -> tuple[str, bool]:
        """Decided with the first piece of a file."""
        job, used = piece.ref.job, self._usage(piece.ref.job, piece.kind)
        if not piece.data.startswith(MAGIC) and self.encrypts(job):
            self._note(job, f"{piece.path}: {CLEAR}")
            return CLEAR, False
        if not over and place.exists():
            return "a later attempt has written it", False
        if piece.kind is Kind.OUTPUT:
            more = piece.size - used.files.get(piece.path, 0)
            if used.size + more > self.limits.job:
                self._note(job, f"{piece.path}: {self._over_job()}")
                return self._over_job(), False
            if piece.path not in used.files and len(used.files) >= FILES_MAX:
                self._note(job, f"{piece.path}: only {FILES_MAX:,} files are kept")
                return f"only {FILES_MAX:,} files of a job are kept", False
        else:
            self._staged[job] = self._staged.get(job, 0) + piece.size
            if self._staged[job] > 2 * self.limits.job:
                self._note(job, f"checkpoint {piece.path}: {self._over_job()}")
                return self._over_job(), False
        if job in self.crowded:
            return "the files of this tenant's jobs take its share of what is kept", True
        if self.total + piece.size > self.limits.total:
            self.problem = "the outputs of all jobs take as much as they may"
            return self.problem, True
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(self.root).free < piece.size + self.limits.spare:
            self.problem = FULL
            return FULL, True
        return "", False

    def _over_job(self) -> str:
        return f"a job may keep {self.limits.job / GIB:.4g} GiB"

    def _remove(self, piece: FilePiece, place: Path, over: bool) -> None:
        if piece.kind is Kind.OUTPUT and over and self._work.path:
            place.unlink(missing_ok=True)
            self._usage(piece.ref.job, piece.kind).drop(piece.path)
            folder, top = place.parent, self.output(piece.ref.job)
            with contextlib.suppress(OSError):
                while folder != top:
                    folder.rmdir()
                    folder = folder.parent

    def _settle(
        self,
        snapshot: Snapshot,
        node: str,
        bound: int,
        answer: Answer,
        kept: Callable[[Kept], None],
    ) -> None:
        """From now on these files are the node's. Those of earlier attempts go: whoever made this
        snapshot has started from them."""
        problem, again, lost = "", False, False
        try:
            self._replace(snapshot, node, min(bound, self.limits.job))
            kept(Kept(snapshot.ref, snapshot.files))
        except Missing as error:
            problem, again, lost = str(error), True, True
        except OSError as error:
            problem, again = f"the head cannot keep it: {error.strerror or error}", True
            self.problem = problem
        except ValueError as error:
            problem = str(error)
        answer(FileAnswer(Kind.CHECKPOINT, snapshot.serial, 0, problem, again, lost))

    def _replace(self, snapshot: Snapshot, node: str, bound: int) -> None:
        """One write of the index is the switch: before it, nothing that it names has changed."""
        job, attempt = snapshot.ref.job, snapshot.ref.attempt
        index = self.index(job)
        if attempt < index.attempt:
            raise ValueError("a later attempt has saved something")
        self._check_size(snapshot, bound)
        staged = self.root / job / STAGED / _word(node)
        came = {file.path for file in snapshot.files if _is_at(staged / file.path, file)}
        for file in snapshot.files:
            if file.path not in came and not _is_at(self.root / job / index.place(file.path), file):
                raise Missing(f"{file.path} has not arrived")
        of = index.of if index.attempt == attempt else {}
        of = {**of, node: list(snapshot.files)}
        wanted = {file.path for files in of.values() for file in files}
        number = 1 + max(index.number, *map(int, self._snapshots(job)), 0)
        if came and self._work.path:
            folder = self.root / job / SNAPSHOTS / str(number)
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            staged.rename(folder)
            sync_folder(folder.parent)
        at = {path: at for path, at in index.at.items() if path in wanted}
        at |= dict.fromkeys(came, number)
        same = index.attempt == attempt
        held = {one: copy for one, copy in index.held.items() if same and one != node}
        self._write_index(job, Index(attempt, of, number, at, held))
        self._staged.pop(job, None)
        self._sweep(job, wanted, at)
        shutil.rmtree(staged, ignore_errors=True)

    def _check_size(self, snapshot: Snapshot, bound: int) -> None:
        wrong = next((path_problem(file.path) for file in snapshot.files), "")
        size = sum(max(0, file.size) for file in snapshot.files)
        if wrong or len(snapshot.files) > FILES_MAX:
            raise ValueError(wrong or f"only {FILES_MAX:,} files of a job are kept")
        if size > bound:
            over = f"{size / GIB:.4g} GiB, and {bound / GIB:.4g} GiB may travel"
            self._note(snapshot.ref.job, f"its checkpoints: {over}")
            raise ValueError(over)

    def _sweep(self, job: str, wanted: set[str], at: dict[str, int]) -> None:
        """Remove what no index names any more, also after a head that was killed before this."""
        for number in self._snapshots(job):
            here = {path for path, one in at.items() if one == int(number)}
            self._keep_only(self.root / job / SNAPSHOTS / number, here)
        self._keep_only(self.root / job / Kind.CHECKPOINT.value, wanted - at.keys())

    def _keep_only(self, folder: Path, paths: set[str]) -> None:
        if not self._work.path:
            return
        if not paths:
            shutil.rmtree(folder, ignore_errors=True)
            return
        for path in files_in(folder):
            if path not in paths:
                (folder / path).unlink(missing_ok=True)

    def _snapshots(self, job: str) -> list[str]:
        try:
            return [name for name in os.listdir(self.root / job / SNAPSHOTS) if name.isdigit()]
        except FileNotFoundError:
            return []

    def adopt(self, job: str, folder: Path, done: Callable[[str], None]) -> None:
        """The job begins with the work in this folder of handed_work.py, unless it has saved some
        itself. `done` gets the problem."""
        self._writer.submit(self._adopt, job, folder, done)

    def _adopt(self, job: str, folder: Path, done: Callable[[str], None]) -> None:
        problem = ""
        try:
            files = msgspec.json.decode((folder / WHOLE).read_bytes(), type=list[KeptFile])
            if not self.index(job).number and self._work.path:
                place = self.root / job / SNAPSHOTS / "1"
                if (folder / FILES).exists():
                    shutil.rmtree(place, ignore_errors=True)
                    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    (folder / FILES).rename(place)
                    sync_folder(place.parent)
                at = {file.path: 1 for file in files}
                self._write_index(job, Index(0, {HANDED: files}, 1, at))
            (folder / WHOLE).replace(folder / ADOPTED)
            shutil.rmtree(folder / FILES, ignore_errors=True)
        except FileNotFoundError:
            pass  # there is none, or no more
        except (OSError, msgspec.DecodeError) as error:
            problem = f"the head cannot keep the work that came with it: {error}"
        done(problem)

    # -- removal ----------------------------------------------------------------------------

    def drop(self, job: str, kind: Kind | None = None) -> None:
        """All of a job's files, or those of one kind; a reader sees all of them or none."""
        if JOB_FOLDER.match(job):
            self._writer.submit(self._drop, job, kind)

    def close(self) -> None:
        self._writer.shutdown(wait=True, cancel_futures=True)

    def _drop(self, job: str, kind: Kind | None) -> None:
        folder = self.output(job) if kind else self.root / job
        if kind is not Kind.OUTPUT:
            self.dropped(job, self.index(job))
        with contextlib.suppress(OSError):
            if kind is Kind.CHECKPOINT and self._work.path:
                (self.root / job / "index.json").unlink(missing_ok=True)
                for name in CHECKPOINT_FOLDERS:
                    shutil.rmtree(self.root / job / name, ignore_errors=True)
            elif folder.exists() and self._work.path:
                (self.root / REMOVED).mkdir(exist_ok=True)
                gone = folder.rename(self.root / REMOVED / f"{job}-{kind or 'all'}")
                shutil.rmtree(gone, ignore_errors=True)
        self._staged.pop(job, None)
        for one in Kind:
            self._used.pop((job, one), None)

    # -- helpers ---------------------------------------------------------------------------

    def _usage(self, job: str, kind: Kind) -> Used:
        used = self._used.get((job, kind))
        if used is None:
            while len(self._used) >= 1_000:  # of jobs that ended long ago
                del self._used[next(iter(self._used))]
            files = {file.path: file.size for file in self.listing(job, kind)}
            used = self._used[job, kind] = Used(files)
        return used

    def _place(self, piece: FilePiece, node: str) -> Path:
        if piece.kind is Kind.OUTPUT:
            return self.output(piece.ref.job) / piece.path
        return self.root / piece.ref.job / STAGED / _word(node) / piece.path

    def _part(self, node: str, serial: int) -> Path:
        return self._work.path / f"{_word(node)}.{serial}"

    def _begin_part(self, node: str, piece: FilePiece) -> None:
        """A copy that begins again takes the place of the one before it. A node that begins many
        and ends none loses the oldest."""
        self._drop_part(node, _key(piece))
        parts = self._parts.setdefault(node, {})
        while len(parts) >= PARTS_MAX:
            self._drop_part(node, next(iter(parts)))
        parts[_key(piece)] = Part(piece.serial, 0, piece.size)

    def _drop_part(self, node: str, key: Key) -> None:
        part = self._parts.get(node, {}).pop(key, None)
        if part is not None:
            with contextlib.suppress(OSError):
                self._part(node, part.serial).unlink(missing_ok=True)

    def _note(self, job: str, text: str) -> None:
        notes = self.notes(job)
        if text not in notes and len(notes) < NOTES_MAX:
            (self.root / job).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._work.write(self.root / job / "notes.json", msgspec.json.encode([*notes, text]))

    def _write_index(self, job: str, index: Index) -> None:
        self._work.write(self.root / job / "index.json", msgspec.json.encode(index))


def _key(piece: FilePiece) -> Key:
    return piece.ref.job, piece.kind, piece.path


def _word(node: str) -> str:
    """A node's name as a file's. The empty one is of the head's own machine."""
    return re.sub(r"[^A-Za-z0-9.-]", "_", node).lstrip(".") or "_"


def _is_at(place: Path, file: KeptFile) -> bool:
    """Whole, and this version of it: what came for a snapshot may have gone with a killed head."""
    try:
        seen = place.stat()
    except OSError:
        return False
    return (seen.st_size, seen.st_mtime_ns // 1_000_000) == (file.size, file.modified_ms)


def _write_all(handle: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(handle, rest, offset)
        rest, offset = rest[count:], offset + count


def _make_room_for(place: Path, top: Path) -> None:
    """Folders around it. What was a file may have become a folder, and the other way round."""
    if place.is_dir():
        shutil.rmtree(place)
    for folder in reversed(place.parents):
        if folder != top and top in folder.parents and folder.is_file():
            folder.unlink()
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
