"""Packages as the controller keeps them: working directories, named by their content."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path
from typing import IO

from shoal.core.state.state import State
from shoal.link.wire import PIECE_BYTES
from shoal.machine.paths import Hangs, ask
from shoal.model.job import PACKAGE_BYTES_MAX, PACKAGE_PATTERN
from shoal.model.report import PackagePiece

# Packages that no job uses stay for the next job, as long as there is room.
STORE_BYTES_MAX = 20 * (1 << 30)
TENANT_BYTES_MAX = STORE_BYTES_MAX // 4
SPARE_BYTES = 256 << 20  # the log of events must always find room on the same disk
UPLOADS_MAX = 8  # at a time
PART_S = 600  # an upload that has not grown for this long has ended
TENANT_UPLOADS_MAX = 4
OWNERS = "of"  # beside the packages: `of/TENANT/SHA256`, a second name of the same file
EVERYBODY = ""  # in place of a tenant: who may use every package


class PackageError(Exception):
    """Why a package cannot be kept; `status` is an HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class PackageStore:
    """A package is stored once, however many tenants send it. A tenant may use those that it has
    sent itself, whole: knowing a name is not enough, and nobody learns what others have."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._uploads: dict[str, int] = {}  # by tenant
        for left in root.glob(".*.part"):  # of a controller that was killed, not of one that lives
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > PART_S:
                    left.unlink()

    def size(self, package: str, tenant: str = EVERYBODY) -> int | None:
        """None if it is not here. A package that is asked for counts as used now."""
        if not _valid(package):
            return None
        path = self._root / OWNERS / tenant / package if tenant else self._root / package
        try:
            ask((str(path),), os.utime, path)
            return ask((str(path),), os.stat, path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def noted(self, package: str, tenant: str) -> bool:
        """Whether this tenant has sent it."""
        return self.size(package, tenant) is not None

    def note(self, package: str, tenant: str) -> None:
        """A tenant has sent it, whole."""
        folder = self._root / OWNERS / tenant
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(self._root / package, folder / package)

    def piece(self, package: str, offset: int) -> PackagePiece:
        size = self.size(package)
        if size is None or offset < 0:
            problem = "the controller no longer has this package; submit the job again"
            return PackagePiece(package, offset, problem=problem)
        try:
            data = ask((str(self._root),), _read_piece, self._root / package, offset)
            return PackagePiece(package, offset, data, size)
        except Hangs:
            raise  # without an answer, the node asks again
        except OSError as error:
            problem = f"the controller cannot read the package: {error.strerror}"
            return PackagePiece(package, offset, problem=problem)

    def begin(self, package: str, size: int, used: set[str], tenant: str = EVERYBODY) -> Upload:
        """`used` packages stay; others make room for this one."""
        if not _valid(package):
            raise PackageError(422, "is not a SHA-256 in lowercase hexadecimal digits")
        if not 0 < size <= PACKAGE_BYTES_MAX:
            bound = f"{PACKAGE_BYTES_MAX >> 20} MiB"
            raise PackageError(413, f"must have from 1 byte to {bound}, and a Content-Length")
        if sum(self._uploads.values()) >= UPLOADS_MAX:
            raise PackageError(503, "too many packages are being sent; try again in a moment")
        if tenant and self._uploads.get(tenant, 0) >= TENANT_UPLOADS_MAX:
            what = f"{tenant} sends {TENANT_UPLOADS_MAX} packages already"
            raise PackageError(429, f"{what}; try again in a moment")
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            self._make_room(size, used | {package}, tenant)
            path = self._root / f".{package}.{secrets.token_hex(4)}.part"
            upload = Upload(self, package, size, path, tenant)
        except OSError as error:
            raise PackageError(507, f"cannot be kept: {error.strerror}") from None
        self._uploads[tenant] = self._uploads.get(tenant, 0) + 1
        return upload

    def ended(self, tenant: str) -> None:
        self._uploads[tenant] -= 1
        if not self._uploads[tenant]:
            del self._uploads[tenant]

    def _make_room(self, size: int, used: set[str], tenant: str) -> None:
        if tenant:
            kept = self._trim(self._root / OWNERS / tenant, TENANT_BYTES_MAX - size, used)
            if kept + size > TENANT_BYTES_MAX:
                most = f"{TENANT_BYTES_MAX >> 30} GiB"
                raise PackageError(429, f"{tenant} has {most} of packages in use, its maximum")
        kept = self._trim(self._root, STORE_BYTES_MAX - size, used)
        if kept + size > STORE_BYTES_MAX:
            most = f"{STORE_BYTES_MAX >> 30} GiB"
            raise PackageError(507, f"live jobs use {most} of packages, the maximum")
        free = shutil.disk_usage(self._root).free
        if free < size + SPARE_BYTES:
            what = f"{size >> 20} MiB do not fit the controller's disk, which has "
            raise PackageError(507, f"{what}{free >> 20} MiB left")

    def _trim(self, folder: Path, most: int, used: set[str]) -> int:
        """Drop the least recently used ones first; returns how many bytes stay."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    if path.is_file():
                        found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= most:
                break
            if path.name not in used and not path.name.startswith("."):
                self._drop(path)
                total -= size
        return total

    def _drop(self, path: Path) -> None:
        """One tenant's name for it, and the package with the last of them; or all of them."""
        whole = self._root / path.name
        path.unlink(missing_ok=True)
        if path == whole:
            for name in (self._root / OWNERS).glob(f"*/{path.name}"):
                name.unlink(missing_ok=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                if whole.stat().st_nlink == 1:
                    whole.unlink()


def may_fetch(state: State, node: str, package: str) -> bool:
    """A node of another machine gets the packages of jobs that run there, or for which it is kept
    warm. A name alone opens nothing."""
    if any(job.spec.package == package for job in state.placed.get(node, {}).values()):
        return True
    return any(
        node in nodes and job_id in state.jobs and state.jobs[job_id].spec.package == package
        for job_id, nodes in state.heard.warm.items()
    )


def _read_piece(path: Path, offset: int) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.pread(handle, PIECE_BYTES, offset)
    finally:
        os.close(handle)


def _valid(package: str) -> bool:
    return bool(package) and re.fullmatch(PACKAGE_PATTERN[1:-1], package) is not None


class Upload:
    """One package on its way in. It is hidden until its content is whole and matches its name."""

    def __init__(
        self, store: PackageStore, package: str, size: int, path: Path, tenant: str
    ) -> None:
        self._store = store
        self._tenant = tenant
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
            whole = self._path.parent / self._package
            if not whole.exists():  # else the names that tenants have for it would be of another
                self._path.replace(whole)
            if self._tenant:
                self._store.note(self._package, self._tenant)
        except OSError as error:
            raise PackageError(507, f"cannot be kept: {error.strerror}") from None

    def close(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)
        self._store.ended(self._tenant)
