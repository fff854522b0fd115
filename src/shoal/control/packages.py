"""Packages as the controller keeps them: working directories, named by their content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import IO

from shoal.files import write_private
from shoal.model.identity import TENANTS_MAX
from shoal.model.job import PACKAGE_BYTES_MAX, PACKAGE_PATTERN
from shoal.model.report import PackagePiece
from shoal.wire import PIECE_BYTES

# Packages that no job uses stay for the next job, as long as there is room.
STORE_BYTES_MAX = 20 * (1 << 30)
SPARE_BYTES = 256 << 20  # the log of events must always find room on the same disk
UPLOADS_MAX = 8  # at a time


class PackageError(Exception):
    """Why a package cannot be kept; `status` is an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PackageStore:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._uploads = 0
        with contextlib.suppress(FileNotFoundError):
            for left in root.glob(".*.part"):  # of a controller that was killed
                left.unlink(missing_ok=True)

    def size(self, package: str) -> int | None:
        """None if it is not here. A package that is asked for counts as used now."""
        if not _valid(package):
            return None
        path = self._root / package
        try:
            os.utime(path)
            return path.stat().st_size
        except FileNotFoundError:
            return None

    def noted(self, package: str, tenant: str) -> bool:
        """Whether this tenant has sent it."""
        try:
            return _valid(package) and tenant in self._senders(package).read_text().split()
        except FileNotFoundError:
            return False

    def note(self, package: str, tenant: str) -> None:
        """A tenant has sent it: there are at most as many lines as there ever were tenants."""
        if self.size(package) is not None and not self.noted(package, tenant):
            path = self._senders(package)
            before = path.read_text().split() if path.exists() else []
            write_private(path, "\n".join([*before, tenant][-TENANTS_MAX:]).encode())

    def _senders(self, package: str) -> Path:
        return self._root / f".{package}.tenants"

    def piece(self, package: str, offset: int) -> PackagePiece:
        size = self.size(package)
        if size is None or offset < 0:
            problem = "the controller has no such package any more; submit the job again"
            return PackagePiece(package, offset, problem=problem)
        try:
            handle = os.open(self._root / package, os.O_RDONLY)
            try:
                return PackagePiece(package, offset, os.pread(handle, PIECE_BYTES, offset), size)
            finally:
                os.close(handle)
        except OSError as error:
            problem = f"the controller cannot read the package: {error.strerror}"
            return PackagePiece(package, offset, problem=problem)

    def begin(self, package: str, size: int, used: set[str]) -> Upload:
        """`used` packages stay; others make room for this one."""
        if not _valid(package):
            raise PackageError(422, "is not a SHA-256 in lowercase hexadecimal digits")
        if not 0 < size <= PACKAGE_BYTES_MAX:
            bound = f"{PACKAGE_BYTES_MAX >> 20} MiB"
            raise PackageError(413, f"must have from 1 byte to {bound}, and a Content-Length")
        if self._uploads >= UPLOADS_MAX:
            raise PackageError(503, "too many packages are being sent; try again in a moment")
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            self._trim(size, used | {package})
            free = shutil.disk_usage(self._root).free
            if free < size + SPARE_BYTES:
                what = f"{size >> 20} MiB do not fit the controller's disk, which has "
                raise PackageError(507, f"{what}{free >> 20} MiB left")
            path = self._root / f".{package}.{secrets.token_hex(4)}.part"
            upload = Upload(self, package, size, path)
        except OSError as error:
            raise PackageError(507, f"cannot be kept: {error.strerror}") from None
        self._uploads += 1
        return upload

    def ended(self) -> None:
        self._uploads -= 1

    def _trim(self, more: int, used: set[str]) -> None:
        """Drop the least recently used ones first."""
        found = []
        for path in self._root.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found) + more
        for _, size, path in sorted(found):
            if total <= STORE_BYTES_MAX:
                return
            if path.name not in used and not path.name.startswith("."):
                path.unlink(missing_ok=True)
                self._senders(path.name).unlink(missing_ok=True)
                total -= size


def _valid(package: str) -> bool:
    return bool(package) and re.fullmatch(PACKAGE_PATTERN[1:-1], package) is not None


class Upload:
    """One package on its way in. It is hidden until its content is whole and matches its name."""

    def __init__(self, store: PackageStore, package: str, size: int, path: Path) -> None:
        self._store = store
        self._package = package
        self._size = size
        self._path = path
        self._got = 0
        self._digest = hashlib.sha256()
        self._file: IO[bytes] = path.open("xb")

    def write(self, data: bytes) -> None:
        self._got += len(data)
        if self._got > self._size:
            raise PackageError(400, f"has more than the {self._size} bytes that were announced")
        self._digest.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            reason = "the controller's disk is full" if error.errno == errno.ENOSPC else error
            raise PackageError(507, f"cannot be kept: {reason}") from None

    def finish(self) -> None:
        if self._got != self._size:
            raise PackageError(400, f"ended after {self._got} of {self._size} bytes")
        if self._digest.hexdigest() != self._package:
            raise PackageError(422, "does not have the SHA-256 that is its name")
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._path.replace(self._path.parent / self._package)
        except OSError as error:
            raise PackageError(507, f"cannot be kept: {error.strerror}") from None

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
        self._store.ended()
