"""A storage that is a folder: files in a new folder of ours, past the page cache where possible.

Nothing is opened by a path that somebody else could change meanwhile: each part of the path is
opened in the one before, and links are refused.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shoal.probes.storage_place import Count, Problem

STREAMS = 4  # at the same time: one rarely fills a shared file system
BLOCK_BYTES = 4 * 1024 * 1024
SYNC_BYTES = 64 * 1024 * 1024  # without direct access, at most this is written between two syncs
BYTES_MAX = 8 * 1024 * 1024 * 1024
FREE_PART = 10  # all nodes together write at most this part of what is free
BYTES_MIN = STREAMS * BLOCK_BYTES
SMALL_BYTES = 4096
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
CACHED = "this file system has no direct access: the page cache may help a little"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
MEMORY_KINDS = ("tmpfs", "ramfs", "devtmpfs")


class Folder:
    def __init__(self, target: str, name: str, nodes: int) -> None:
        self.notes: list[str] = []
        self._target, self._name = target, name
        self._parent = open_folder(target)
        try:
            self._room = _room(self._parent, target, nodes)
            try:
                os.mkdir(name, 0o700, dir_fd=self._parent)
            except OSError as error:
                raise _cannot_write(target, error) from None
            self._own = os.open(name, FOLDER, dir_fd=self._parent)
        except BaseException:
            os.close(self._parent)
            raise
        self._content = os.urandom(BLOCK_BYTES)  # some disks store zeros for free
        self._direct = True
        self._written = [0] * STREAMS
        self._note_kind()
        self._note_members()

    def write(self, phase_s: float) -> Count:
        return _together(self._write_one, phase_s, self._target)

    def read(self, phase_s: float) -> Count:
        return _together(self._read_one, phase_s, self._target)

    def small(self, phase_s: float) -> Count:
        return _together(self._small_one, phase_s, self._target)

    def remove(self) -> None:
        _empty(self._own)
        os.close(self._own)
        os.rmdir(self._name, dir_fd=self._parent)
        os.close(self._parent)

    def _write_one(self, stream: int, until: float) -> int:
        """The file grows to its share of the room, then it is written again from its start."""
        share = self._room // STREAMS // BLOCK_BYTES * BLOCK_BYTES
        handle = self._create(f"data{stream}")
        done = place = unsynced = 0
        with contextlib.closing(mmap.mmap(-1, BLOCK_BYTES)) as block:
            block.write(self._content)
            try:
                while not done or time.monotonic() < until:
                    block[:16] = os.urandom(16)  # and the same block twice
                    if place >= share:
                        place = os.lseek(handle, 0, os.SEEK_SET)
                    wrote = os.write(handle, block)
                    if wrote % mmap.PAGESIZE:
                        raise OSError(errno.ENOSPC, "No space left on device")
                    place, done, unsynced = place + wrote, done + wrote, unsynced + wrote
                    self._written[stream] = max(self._written[stream], place)
                    if not self._direct and unsynced >= SYNC_BYTES:
                        os.fdatasync(handle)
                        unsynced = 0
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
        return done

    def _create(self, name: str) -> int:
        how = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
        if self._direct:
            try:
                return os.open(name, how | os.O_DIRECT, 0o600, dir_fd=self._own)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._direct = False
                with contextlib.suppress(FileNotFoundError):  # some make the file all the same
                    os.unlink(name, dir_fd=self._own)
                self.notes += [] if CACHED in self.notes else [CACHED]
        return os.open(name, how, 0o600, dir_fd=self._own)

    def _read_one(self, stream: int, until: float) -> int:
        how = os.O_RDONLY | os.O_NOFOLLOW | (os.O_DIRECT if self._direct else 0)
        handle = os.open(f"data{stream}", how, dir_fd=self._own)
        done = place = 0
        with contextlib.closing(mmap.mmap(-1, BLOCK_BYTES)) as block:
            try:
                while not done or time.monotonic() < until:
                    got = os.readv(handle, [block])
                    done, place = done + got, place + got
                    if not got or place >= self._written[stream]:
                        if not place:
                            break
                        place = os.lseek(handle, 0, os.SEEK_SET)
                        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
        return done

    def _small_one(self, stream: int, until: float) -> int:
        """Files that were created, written, synced, read and removed."""
        content, done = os.urandom(SMALL_BYTES), 0
        while not done or time.monotonic() < until:
            name = f"small{stream}-{done}"
            how = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
            handle = os.open(name, how, 0o600, dir_fd=self._own)
            try:
                os.write(handle, content)
                os.fsync(handle)
            finally:
                os.close(handle)
            handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._own)
            try:
                os.read(handle, SMALL_BYTES)
            finally:
                os.close(handle)
            os.unlink(name, dir_fd=self._own)
            done += 1
        return done

    def _note_kind(self) -> None:
        kind = file_system(self._own)
        if kind in MEMORY_KINDS:
            self.notes.append(f"{self._target} is {kind}: these are rates of memory, not of a disk")

    def _note_members(self) -> None:
        """We may be root, where members run as their tenants' users."""
        found = os.fstat(self._parent)
        if os.geteuid() == 0 and not found.st_mode & stat.S_IWOTH:
            self.notes.append(
                f"only its owner (user {found.st_uid}) or group ({found.st_gid}) may write in "
                f"{self._target}: jobs of other users could not"
            )


def open_folder(target: str) -> int:
    """The folder itself, whatever happens to its path later."""
    handle = os.open("/", os.O_PATH | os.O_DIRECTORY)
    path = ""
    try:
        for part in [part for part in target.split("/") if part not in ("", ".")]:
            path += f"/{part}"
            how = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
            try:
                inner = os.open(part, how, dir_fd=handle)
            except OSError as error:
                raise _cannot_open(path, part, handle, error) from None
            os.close(handle)
            handle = inner
        try:
            return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle)
        except OSError as error:
            raise Problem(f"{target} cannot be read: {error.strerror}") from None
    finally:
        os.close(handle)


def _cannot_open(path: str, part: str, parent: int, error: OSError) -> Problem:
    if error.errno == errno.ENOENT:
        return Problem(f"there is no folder {path}")
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        try:
            link = os.readlink(part, dir_fd=parent)
        except OSError:
            return Problem(f"{path} is not a folder")
        return Problem(f"{path} is a link to {link}: name the folder itself")
    return Problem(f"{path} cannot be opened: {error.strerror}")


def _cannot_write(target: str, error: OSError) -> Problem:
    if error.errno in (errno.EACCES, errno.EPERM):
        return Problem(f"user {os.geteuid()} must not write in {target}")
    if error.errno == errno.EROFS:
        return Problem(f"{target} is read-only")
    if error.errno in NO_ROOM:
        return Problem(f"there is no space left in {target}")
    return Problem(f"{target} cannot be written: {error.strerror}")


def _room(folder: int, target: str, nodes: int) -> int:
    """How many bytes this node may have there: the disk may be shared with all the others."""
    found = os.statvfs(folder)
    if found.f_flag & os.ST_RDONLY:
        raise Problem(f"{target} is read-only")
    free = found.f_bavail * found.f_frsize
    room = min(BYTES_MAX, free // FREE_PART // max(1, nodes))
    if room < BYTES_MIN:
        need = BYTES_MIN * FREE_PART * max(1, nodes) // 1_000_000
        raise Problem(
            f"only {free // 1_000_000} MB are free in {target}; a check needs {need} MB, "
            f"because it takes a tenth at most"
        )
    return room


def _together(one: Callable[[int, float], int], phase_s: float, target: str) -> Count:
    """All streams at once. The first failure ends it."""
    began = time.monotonic()
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(one, stream, began + phase_s) for stream in range(STREAMS)]
        try:
            done = sum(each.result() for each in running)
        except OSError as error:
            raise _cannot_write(target, error) from None
    return Count(done, time.monotonic() - began)


def _empty(folder: int) -> None:
    for name in os.listdir(folder):
        os.unlink(name, dir_fd=folder)


def remove_left(target: str, name: str) -> None:
    """What a killed probe of this node left. It must be a folder, and ours."""
    try:
        parent = open_folder(target)
    except Problem:
        return
    try:
        own = os.open(name, FOLDER, dir_fd=parent)
    except FileNotFoundError:
        os.close(parent)
        return
    try:
        if os.fstat(own).st_uid == os.geteuid():
            _empty(own)
            os.rmdir(name, dir_fd=parent)
    finally:
        os.close(own)
        os.close(parent)


def file_system(folder: int) -> str:
    """Its kind, as the kernel names it: ext4, nfs4, tmpfs; '' if that is not known."""
    device = os.fstat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            words = line.split()
            if words[2] == wanted:
                return words[words.index("-") + 1]
    return ""
