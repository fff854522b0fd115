"""The audit log's files: appended in batches, rotated by size, verified line by line."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from shoal.control.alarms import Alarms
from shoal.machine.files import read_own, write_private
from shoal.model.people import AuditEntry, Mark

# Lines on their way into the audit log. They wait in memory while the log takes none.


WAITING_MAX = 10_000  # lines in memory
RETRY_S = 1.0
CAUSE = "audit"

Waiting = tuple[AuditEntry, asyncio.Future[None]]


class AuditQueue:
    """Lines are written once per turn of the event loop, all that came in it together."""

    def __init__(self, alarms: Alarms) -> None:
        self.stuck = False  # lines wait, because they cannot be written
        self.head = FIRST_HASH  # the hash of the newest line
        self._alarms = alarms
        self._waiting: list[Waiting] = []
        self._dropped = 0
        self._flushing: asyncio.TimerHandle | asyncio.Handle | None = None

    async def write(self, entry: AuditEntry) -> None:
        """Returns when the line is written, or cannot be for now: then it is kept in memory, an
        alarm says so, and `stuck` is true until it is written."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if len(self._waiting) >= WAITING_MAX:
            _, dropped = self._waiting.pop(0)
            self._dropped += 1
            if not dropped.done():
                dropped.set_result(None)
        self._waiting.append((entry, done))
        if self.stuck:
            return  # a timer tries again
        if self._flushing is None:
            self._flushing = loop.call_soon(self._flush)
        await done

    def newest_first(self) -> Iterator[AuditEntry]:
        """As far back as the log goes; a line that cannot be read is left out."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def _flush(self) -> None:
        """Write what waits."""
        raise NotImplementedError

    def _settle(self, batch: list[Waiting], problem: str) -> None:
        """The lines are written, or there is a problem, and they wait: their senders do not."""
        if problem:
            self.stuck = True
            rule = "until it can, only the operator may change something"
            self._alarms.raise_(CAUSE, f"{problem}; {rule}")
            self._flushing = asyncio.get_running_loop().call_later(RETRY_S, self._flush)
        else:
            self.stuck, self._dropped = False, 0
            self._alarms.clear(CAUSE)
        for _, done in batch:
            if not done.done():
                done.set_result(None)


log = logging.getLogger("shoal.control")

AUDIT_NAME = "audit.log"
FILE_BYTES_MAX = 16 * 1024 * 1024
FILES_MAX = 8  # then the oldest is removed
SYNC_S = 0.5  # between two times that lines are forced to the disk


class AuditBroken(Exception):
    """The log is not as it was written; the message names the first line that is wrong."""


class AuditLog(AuditQueue):
    """The files are written at once, and forced to the disk by a thread, behind the answers. The
    mark beside them follows what was forced, so it never claims too much."""

    def __init__(self, path: Path, alarms: Alarms) -> None:
        super().__init__(alarms)
        self.path = path
        self._mark: Mark | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._sync_at = 0.0  # not before this
        self._closing = asyncio.Event()
        self._handle = -1
        self._seq = 0
        with contextlib.suppress(OSError):  # the first line tries again, and raises the alarm
            self._open()

    def newest_first(self) -> Iterator[AuditEntry]:
        return newest_first(self.path)

    async def close(self) -> None:
        self._closing.set()
        self._flush()
        if self._flushing is not None:
            self._flushing.cancel()
        for _ in range(2):  # one that is under way, and one for what came meanwhile
            self._sync()
            if self._syncing is not None:
                await self._syncing
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _flush(self) -> None:
        self._flushing, batch, problem = None, self._waiting, ""
        if not batch:
            return
        try:
            self._write(batch)
        except OSError as error:
            problem = f"{self.path} cannot be written: {error.strerror}"
        else:
            self._waiting = []
        self._settle(batch, problem)
        if not problem:
            self._sync()

    def _write(self, batch: list[Waiting]) -> None:
        if self._handle < 0:
            self._open()
        if os.fstat(self._handle).st_size >= FILE_BYTES_MAX:
            self._rotate()
        size = os.fstat(self._handle).st_size
        seq, head, lines = self._seq, self.head, bytearray()
        for number, (entry, _) in enumerate(batch):
            seq += 1
            skipped = entry.skipped + (self._dropped if not number else 0)
            first = head if not size and not number else ""
            entry = msgspec.structs.replace(entry, seq=seq, skipped=skipped, prev=first)
            line, head = sealed(entry, head)
            lines += line + b"\n"
        try:
            rest = memoryview(lines)
            while rest:
                rest = rest[os.write(self._handle, rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # a nearly full disk may have taken a part
                os.ftruncate(self._handle, size)
            raise
        self._seq, self.head = seq, head

    def _open(self) -> None:
        """Continue the chain where the log ends, or where the mark says that it ended."""
        self._mark = mark_of(self.path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        self._handle = os.open(self.path, flags, 0o600)
        _drop_torn_line(self._handle)
        self._seq, self.head = _end_of(self.path)
        mark = self._mark
        if mark is not None and mark.seq > self._seq:
            text = f"{self.path} ends at line {self._seq}, but line {mark.seq} was written"
            self._seq, self.head = mark.seq, mark.hash
        elif mark is None and self._seq:
            text = f"{_mark_path(self.path)} is missing, which says where the audit log ends"
        else:
            return
        self._alarms.raise_("audit log cut", f"{text}; see: shoal audit verify")

    def _rotate(self) -> None:
        os.fsync(self._handle)
        _numbered(self.path, FILES_MAX - 1).unlink(missing_ok=True)
        for number in range(FILES_MAX - 2, -1, -1):
            with contextlib.suppress(FileNotFoundError):
                _numbered(self.path, number).replace(_numbered(self.path, number + 1))
        fresh = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        os.close(self._handle)
        self._handle = fresh

    def _sync(self) -> None:
        if self._handle >= 0 and (self._syncing is None or self._syncing.done()):
            self._syncing = asyncio.get_running_loop().create_task(self._sync_all())

    async def _sync_all(self) -> None:
        """One thread at a time; lines that come meanwhile are forced in the next round."""
        while self._mark is None or self._mark.seq != self._seq:
            pause_s = self._sync_at - time.monotonic()
            if pause_s > 0 and not self._closing.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), pause_s)
            self._sync_at = time.monotonic() + SYNC_S
            mark, handle = Mark(self._seq, self.head), os.dup(self._handle)
            try:
                await asyncio.to_thread(_force, handle, self.path, mark)
            except OSError as error:
                log.warning("the audit log's mark cannot be written: %s", error.strerror)
                asyncio.get_running_loop().call_later(RETRY_S, self._sync)
                return
            self._mark = mark


def _force(handle: int, path: Path, mark: Mark) -> None:
    try:
        os.fdatasync(handle)
    finally:
        os.close(handle)
    write_private(_mark_path(path), msgspec.json.encode(mark))


def mark_of(path: Path) -> Mark | None:
    try:
        return msgspec.json.decode(read_own(_mark_path(path)), type=Mark)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def newest_first(path: Path) -> Iterator[AuditEntry]:
    """As far back as there are files; a line that cannot be read is left out."""
    for file in reversed(_files(path)):
        with contextlib.suppress(OSError):
            for line in reversed(_lines(file)):
                with contextlib.suppress(msgspec.DecodeError):
                    yield msgspec.json.decode(line, type=AuditEntry)


def verify(path: Path) -> tuple[AuditEntry | None, AuditEntry | None]:
    """The oldest and the newest entry. Raises AuditBroken at the first line that was changed,
    removed, added or moved, and if lines are missing at an end."""
    files = _files(path)
    lines = (
        (f"line {number} of {file.name}", line)
        for file in files
        for number, line in enumerate(_lines(file), 1)
    )
    missing = f"{_mark_path(path).name} is missing"
    return verify_lines(lines, mark_of(path), missing, cut=len(files) >= FILES_MAX)


def verify_lines(
    lines: Iterable[tuple[str, bytes]], mark: Mark | None, unmarked: str, *, cut: bool
) -> tuple[AuditEntry | None, AuditEntry | None]:
    """Lines with their places, the oldest first. `unmarked`: why the end is not known. `cut`: the
    oldest may have been removed, as the bound on the log demands."""
    first: AuditEntry | None = None
    last: AuditEntry | None = None
    for where, line in lines:
        last = _next(where, line, last)
        first = first or last
        if mark is not None and last.seq == mark.seq and last.hash != mark.hash:
            raise AuditBroken(f"{where} is not the line that was written there")
    if first is not None and first.seq > 1 and not cut:
        raise AuditBroken(f"the lines before number {first.seq} are missing")
    if mark is not None and mark.seq > (last.seq if last else 0):
        end = f"the log ends at number {last.seq}" if last else "the log is empty"
        raise AuditBroken(f"{end}, but number {mark.seq} was written")
    if mark is None and last is not None:
        raise AuditBroken(f"{unmarked}, so the end cannot be verified")
    return first, last


def _next(where: str, line: bytes, last: AuditEntry | None) -> AuditEntry:
    try:
        found = msgspec.json.decode(line, type=AuditEntry)
    except msgspec.DecodeError:
        raise AuditBroken(f"{where} was changed: it cannot be read") from None
    if last is not None and found.seq != last.seq + 1:
        raise AuditBroken(
            f"{where} has number {found.seq} but follows {last.seq}: lines were removed or moved"
        )
    # What came before the oldest line may have been removed, as the bound on the log demands.
    if last is None and found.seq > 1 and not found.prev:
        raise AuditBroken(f"{where} has number {found.seq}: the lines before it are missing")
    prev = last.hash if last is not None else found.prev or FIRST_HASH
    if opened(line, prev) is None:
        raise AuditBroken(f"{where} (number {found.seq}) was changed")
    return found


def _end_of(path: Path) -> tuple[int, str]:
    for entry in newest_first(path):
        return entry.seq, entry.hash
    return 0, FIRST_HASH


def _drop_torn_line(handle: int) -> None:
    """A crash may have left half a line, which no answer has waited for."""
    size = os.fstat(handle).st_size
    data = os.pread(handle, size, 0)
    if data and not data.endswith(b"\n"):
        os.ftruncate(handle, data.rfind(b"\n") + 1)


def _lines(file: Path) -> list[bytes]:
    """Whole lines only."""
    return file.read_bytes().split(b"\n")[:-1]


def _files(path: Path) -> list[Path]:
    """The oldest first."""
    found = [_numbered(path, number) for number in range(FILES_MAX - 1, -1, -1)]
    return [file for file in found if file.exists()]


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _mark_path(path: Path) -> Path:
    return path.with_name("audit.mark")


# The lines of the audit log. Each has a hash of itself and the line before it, so that a change of
# the past shows.


FIRST_HASH = "0" * 64  # before the first line ever
_HASH_FIELD = b',"hash":"'
_SECRET = re.compile(r"((?:shoal|invite)_[A-Za-z0-9]{1,16}_)[^/\s]+")


def sealed(entry: AuditEntry, prev: str) -> tuple[bytes, str]:
    """The entry as a line without its end, and the line's hash."""
    body = msgspec.json.encode(msgspec.structs.replace(entry, hash=""))
    hash_ = _hash(prev, body)
    return body[:-1] + _HASH_FIELD + hash_.encode() + b'"}', hash_


def opened(line: bytes, prev: str) -> AuditEntry | None:
    """The entry of a line, if it is unchanged and follows the line with the hash `prev`."""
    head, mark, tail = line.rpartition(_HASH_FIELD)
    if not mark or tail[-2:] != b'"}' or _hash(prev, head + b"}").encode() != tail[:-2]:
        return None
    try:
        return msgspec.json.decode(line, type=AuditEntry)
    except msgspec.DecodeError:
        return None


def without_secret(text: str) -> str:
    """Somebody may put a whole token where its id belongs."""
    return _SECRET.sub(r"\1...", text)


def _hash(prev: str, body: bytes) -> str:
    return hashlib.sha256(prev.encode() + body).hexdigest()
