"""Packages on a node: fetched piece by piece, once, and kept for the next job."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import stat
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.agent.blocks.store import Offer
from shoal.agent.faults import CannotStart
from shoal.link.wire import PIECE_BYTES
from shoal.model.blocks import Seek, Sought, digest, package_source
from shoal.model.job import PACKAGE_BYTES_MAX, PACKAGE_FILES_MAX, Fault, MemberRef
from shoal.model.report import PackagePiece

if TYPE_CHECKING:
    from shoal.agent.package_sharing import PackageSharing

log = logging.getLogger("shoal.agent")

WINDOW = 4  # pieces requested ahead of their answers
ANSWER_S_MAX = 5.0  # then they are requested again: the controller may have died
KEPT_BYTES_MAX = 20 * (1 << 30)
KEPT_MAX = 64
SHARED_BYTES_MIN = 16 << 20  # a smaller one is here sooner from the head alone
BLOCKS = ".blocks"
SPARE_BYTES = 256 << 20  # kept free on the node's disk for members and their output
MEGA = 1e6


class Purpose(NamedTuple):
    """For which member a package is fetched. `mbit_s`: how fast at most; 0: at any speed."""

    ref: MemberRef
    mbit_s: int = 0


class Transfer:
    """One package on its way here, for all the members that wait for it."""

    def __init__(self, part: Path, purpose: Purpose | None = None) -> None:
        self.purpose = purpose
        self.sharing: PackageSharing | None = None  # with other nodes
        self.part = part
        # An earlier attempt's part is continued; the whole package is verified at the end.
        self.handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.got = os.fstat(self.handle).st_size
        self.size: int | None = None
        self.asked = self.got  # the offset to request next
        self.asked_at = 0.0
        self.waiters = 0
        self.unpacking = False
        self.damaged = False
        self.done: asyncio.Future[Path] = asyncio.get_running_loop().create_future()

    def begin_anew(self) -> None:
        os.ftruncate(self.handle, 0)
        self.got = self.asked = 0

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class Packages:
    """`need` sends a request to the controller, which may get lost. `in_use` returns the packages
    that members run from."""

    def __init__(
        self, root: Path, need: Callable[[str, int], None], in_use: Callable[[], set[str]]
    ) -> None:
        self._root = root
        self._need = need
        self._in_use = in_use
        self._transfers: dict[str, Transfer] = {}
        self._unpacking: set[asyncio.Task[None]] = set()
        self.name = ""  # of this node, in the head's words
        self.seek: Callable[[Seek], None] = lambda _: None
        self.offer: Callable[[Offer], None] = lambda _: None
        if root.is_dir():
            for left in root.glob(".*.unpacking"):
                remove(left)

    def here(self, package: str) -> Path | None:
        """Its folder if it is unpacked. This counts as a use."""
        path = self._root / package
        try:
            os.utime(path)
        except OSError:
            return None
        return path

    async def get(self, package: str, purpose: Purpose | None = None) -> Path:
        """Returns when it is here. If one caller is cancelled, the others' transfer goes on."""
        found = self.here(package)
        if found is not None:
            return found
        transfer = self._transfers.get(package)
        if transfer is None:
            transfer = self._begin(package, purpose)
        transfer.waiters += 1
        try:
            return await asyncio.shield(transfer.done)
        finally:
            transfer.waiters -= 1
            if not transfer.waiters and not transfer.unpacking:
                self._drop(package)

    def progress(self, package: str) -> str:
        transfer = self._transfers.get(package)
        if transfer is not None and transfer.unpacking:
            return "is unpacking its working directory"
        if transfer is None or transfer.size is None:
            return "is requesting its working directory"
        here = transfer.got if transfer.sharing is None else transfer.sharing.got
        size, got = transfer.size / MEGA, here / MEGA
        return f"is fetching its working directory: {got:.1f} of {size:.1f} MB"

    def take(self, piece: PackagePiece) -> None:
        transfer = self._transfers.get(piece.package)
        if transfer is None or transfer.unpacking:
            return
        if transfer.sharing is not None:
            transfer.sharing.take(piece)
            return
        if piece.problem:
            self._fail(piece.package, piece.problem)
            return
        try:
            if transfer.size is None:
                transfer.size = self._admit(piece)
                if (
                    transfer.size >= SHARED_BYTES_MIN
                    and not transfer.got
                    and self._shares(transfer)
                ):
                    self._share(piece.package, transfer)
                    return
            if piece.offset != transfer.got:
                return  # requested twice
            transfer.got += os.write(transfer.handle, piece.data)
        except CannotStart as error:
            self._fail(piece.package, str(error))
            return
        except OSError as error:
            self._fail(piece.package, f"cannot keep the working directory: {error.strerror}")
            return
        if transfer.got >= transfer.size:
            self._finish(piece.package, transfer)
        else:
            self._ask(piece.package, transfer)

    def ask_again(self, *, all_of_them: bool) -> None:
        """Called after a new connection and regularly: request again what was not answered."""
        for package, transfer in self._transfers.items():
            late = time.monotonic() - transfer.asked_at > ANSWER_S_MAX
            if transfer.sharing is not None and (all_of_them or late):
                transfer.asked_at = time.monotonic()
                transfer.sharing.ask_again()
            elif not transfer.unpacking and (all_of_them or late):
                transfer.asked = transfer.got
                self._ask(package, transfer)

    def found(self, sought: Sought) -> None:
        """The head says where blocks are."""
        transfer = self._transfers.get(sought.fingerprint)
        if transfer is not None and transfer.sharing is not None:
            transfer.sharing.found(sought)

    def _shares(self, transfer: Transfer) -> bool:
        return bool(self.name and transfer.purpose) and not transfer.damaged

    def _share(self, package: str, transfer: Transfer) -> None:
        """From now on in blocks, also from nodes that fetch it, too."""
        from shoal.agent.package_sharing import PackageSharing

        assert transfer.purpose is not None
        assert transfer.size is not None
        folder = self._root / f".{package}{BLOCKS}"
        ref, mbit_s = transfer.purpose
        ways = self._need, self.seek
        transfer.sharing = PackageSharing(
            folder, package, transfer.size, ref, *ways, node=self.name, mbit_s=mbit_s
        )
        self.offer(Offer(key=_key(package), folder=str(folder), owner=os.geteuid()))
        task = asyncio.create_task(self._gather(package, transfer))
        self._unpacking.add(task)
        task.add_done_callback(self._unpacking.discard)

    async def _gather(self, package: str, transfer: Transfer) -> None:
        assert transfer.sharing is not None
        try:
            await transfer.sharing.wait()
        except Exception as error:  # what the head or this disk says
            if self._transfers.get(package) is transfer:
                self._fail(package, str(error))
            return
        if self._transfers.get(package) is transfer:
            await self._unpack(package, transfer, transfer.sharing.archive)

    def _begin(self, package: str, purpose: Purpose | None) -> Transfer:
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            transfer = Transfer(self._root / f".{package}.part", purpose)
        except OSError as error:
            message = f"cannot keep a working directory on this node: {error.strerror}"
            raise CannotStart(message) from None
        self._transfers[package] = transfer
        transfer.done.add_done_callback(_looked_at)
        log.info("fetching package %s from byte %d", package[:12], transfer.got)
        self._ask(package, transfer)
        return transfer

    def _ask(self, package: str, transfer: Transfer) -> None:
        """At most WINDOW pieces ahead. The first answer brings the sizes of package and pieces."""
        transfer.asked_at = time.monotonic()
        if transfer.size is None:
            self._need(package, transfer.got)
            transfer.asked = transfer.got + PIECE_BYTES
            return
        while transfer.asked < min(transfer.size, transfer.got + WINDOW * PIECE_BYTES):
            self._need(package, transfer.asked)
            transfer.asked += PIECE_BYTES

    def _admit(self, piece: PackagePiece) -> int:
        """Raises if the disk has no room for both the archive and the folder."""
        if not 0 < piece.size <= PACKAGE_BYTES_MAX:
            raise CannotStart("the controller offers a package of an impossible size")
        self._trim(2 * piece.size)
        free = shutil.disk_usage(self._root).free
        if free < 2 * piece.size + SPARE_BYTES:
            needed = (2 * piece.size + SPARE_BYTES) / MEGA
            raise CannotStart(
                f"no room for the working directory: it needs {needed:.0f} MB free on this node, "
                f"and {free / MEGA:.0f} MB are",
                Fault.MISSING,
            )
        return piece.size

    def _finish(self, package: str, transfer: Transfer) -> None:
        transfer.unpacking = True
        task = asyncio.create_task(self._unpack(package, transfer, transfer.part))
        self._unpacking.add(task)
        task.add_done_callback(self._unpacking.discard)

    async def _unpack(self, package: str, transfer: Transfer, archive: Path) -> None:
        target = self._root / package
        transfer.unpacking = True
        try:
            await asyncio.to_thread(unpack, archive, package, target)
        except Damaged as error:
            if transfer.damaged:
                self._fail(package, f"{error}, twice")
                return
            transfer.damaged, transfer.unpacking = True, False
            if transfer.sharing is not None:  # perhaps by another node: now from the head alone
                transfer.sharing.close()
                transfer.sharing = None
                self.offer(Offer(key=_key(package)))
                shutil.rmtree(self._root / f".{package}{BLOCKS}", ignore_errors=True)
            transfer.begin_anew()
            self._ask(package, transfer)
            return
        except BadPackage as error:
            self._fail(package, str(error))
            return
        except OSError as error:
            self._fail(package, f"cannot unpack the working directory: {error.strerror}")
            return
        except Exception as error:  # else the members that wait for it would wait forever
            log.exception("package %s", package[:12])
            self._fail(package, f"cannot unpack the working directory: {error}")
            return
        transfer.part.unlink(missing_ok=True)
        if not transfer.done.done():
            transfer.done.set_result(target)
        self._drop(package)
        log.info("package %s is here: %d bytes", package[:12], transfer.got)

    def _fail(self, package: str, why: str) -> None:
        transfer = self._transfers[package]
        log.warning("package %s: %s", package[:12], why)
        if not transfer.done.done():
            transfer.done.set_exception(CannotStart(why))
        self._drop(package)
        transfer.part.unlink(missing_ok=True)

    def _drop(self, package: str) -> None:
        transfer = self._transfers.pop(package, None)
        if transfer is not None:
            transfer.close()
            if transfer.sharing is not None:
                transfer.sharing.close()
                if not transfer.sharing.archive.exists():
                    self.offer(Offer(key=_key(package)))

    def _trim(self, more: int) -> None:
        """The least recently used go first; those in use stay."""
        used = self._in_use()
        found = []
        for path in self._root.iterdir():
            if name_of(path) not in self._transfers:
                with contextlib.suppress(FileNotFoundError):
                    found.append((path.stat().st_mtime_ns, _bytes_of(path), path))
        total = sum(size for _, size, _ in found) + more
        count = len(found)
        for _, size, path in sorted(found):
            if total <= KEPT_BYTES_MAX and count < KEPT_MAX:
                return
            if path.name in used:
                continue
            if path.name.endswith(BLOCKS):
                self.offer(Offer(key=_key(name_of(path))))
            if path.is_dir():
                remove(path)
            else:
                path.unlink(missing_ok=True)
            log.info("removed %s, the least recently used", path.name[:13])
            total -= size
            count -= 1


def name_of(path: Path) -> str:
    """Of the package; partial ones, too."""
    return path.name.removeprefix(".").partition(".")[0]


def _key(package: str) -> str:
    """As the head's tracker names it: its own name is its hash, for every tenant."""
    return digest(package_source(package), package)


def _bytes_of(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(path)
        for name in names
    )


def _looked_at(future: asyncio.Future[Path]) -> None:
    """A failed transfer that no member waits for any more is not an error."""
    if not future.cancelled():
        future.exception()


# Unpacks a package: read-only, and never outside of its own folder.


COPY_BYTES = 1 << 20
BLOCK_BYTES = tarfile.BLOCKSIZE
# What `shoal.link.packing` writes. Everything else is refused before `tarfile` sees it, because
# `tarfile` reads headers of any length into memory and expands a sparse file to gigabytes.
KINDS = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.XHDTYPE)
LONG_KEYS = (b"path", b"linkpath", b"hdrcharset")
LONG_BYTES_MAX = 16 * 1024  # of a name too long for a plain header
DEPTH_MAX = 100
HOPS_MAX = 40  # as Linux follows them


class BadPackage(Exception):
    """What arrived is not what was sent, or not a package."""


class Damaged(BadPackage):
    """Its content does not match its name. Fetching it again may help."""


def unpack(archive: Path, sha256: str, target: Path) -> None:
    """All of it or nothing: `target` exists only when it is complete. Everything in it is checked,
    because anybody who may submit a job can have made it by hand."""
    with archive.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise Damaged(f"the working directory arrived damaged (package {sha256[:12]})")
    partial = target.with_name(f".{target.name}.unpacking")
    remove(partial)
    partial.mkdir(mode=0o700)
    try:
        _extract(archive, partial)
        _make_read_only(partial)
        partial.rename(target)
    except (tarfile.TarError, UnicodeError, ValueError, EOFError) as error:
        raise BadPackage(f"the package {sha256[:12]} is not a valid archive: {error}") from None
    finally:
        remove(partial)


def remove(folder: Path) -> None:
    """Removes read-only files too."""
    if not folder.is_dir():
        return
    for place, _, _ in os.walk(folder):
        os.chmod(place, 0o700)
    shutil.rmtree(folder)


def _scan(archive: Path) -> None:
    """Check every header by itself before `tarfile` interprets them together."""
    total = count = 0
    with archive.open("rb") as file:
        while (header := file.read(BLOCK_BYTES)).strip(b"\0"):
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            if info.type not in KINDS:
                raise BadPackage(f"{info.name[:100]!r} in the package is neither file nor folder")
            if info.size and info.type in (tarfile.DIRTYPE, tarfile.SYMTYPE):
                # We would skip that content, but `tarfile` would read it as the next headers.
                raise BadPackage(f"{info.name[:100]!r} in the package is no file but has content")
            count += 1
            total += info.size
            # A name that is too long for its header takes a second one.
            if count > 2 * (PACKAGE_FILES_MAX + 1) or not 0 <= total <= PACKAGE_BYTES_MAX:
                raise BadPackage("the package holds more than a package may")
            length = -(-info.size // BLOCK_BYTES) * BLOCK_BYTES
            if info.type == tarfile.XHDTYPE:
                if info.size > LONG_BYTES_MAX:
                    raise BadPackage("a name in the package is too long")
                _check_long(file.read(length)[: info.size])
            else:
                file.seek(length, os.SEEK_CUR)


def _check_long(data: bytes) -> None:
    """Records as `length key=value`; allowed for a long name or link target only."""
    while data:
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or not len(length) < int(length[:9]) <= len(data):
            raise BadPackage("a header in the package is damaged")
        key = rest.partition(b"=")[0]
        if key not in LONG_KEYS:
            raise BadPackage(f"{key[:40]!r} is not allowed in a header of a package")
        data = data[int(length) :]


def _extract(archive: Path, root: Path) -> None:
    _scan(archive)
    links: dict[str, str] = {}
    made: set[str] = set()
    total = count = 0
    with tarfile.open(archive, mode="r:") as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # or it would remember them all
            count += 1
            total += member.size
            name = _checked(member.name, links)
            for parent in _folders(name if member.isdir() else os.path.dirname(name)):
                if parent not in made:
                    made.add(parent)
                    (root / parent).mkdir(exist_ok=True)
            if count + len(made) > 2 * (PACKAGE_FILES_MAX + 1) or total > PACKAGE_BYTES_MAX:
                raise BadPackage("the package holds more than a package may")
            if member.isreg():
                _extract_file(tar, member, root / name)
            elif member.issym():
                os.symlink(member.linkname, root / name)
                links[name] = member.linkname
    for name in links:
        if _leaves(name, links):
            raise BadPackage(f"the link {name[:100]!r} in the package leads out of it")


def _folders(name: str) -> list[str]:
    """The folder and its parents, from the top."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _leaves(name: str, links: dict[str, str]) -> bool:
    """Follow a link as the kernel would, through other links; `..` counts from their targets."""
    todo, hops = [name], 0
    here: list[str] = []
    while todo:
        first, _, rest = todo.pop().partition("/")
        if rest:
            todo.append(rest)
        if first == "..":
            if not here:
                return True
            here.pop()
        elif first not in ("", "."):
            target = links.get("/".join([*here, first]))
            if target is None:
                here.append(first)
                if len(here) > DEPTH_MAX:
                    return True
                continue
            hops += 1
            if target.startswith("/") or hops > HOPS_MAX:
                return True
            todo.append(target)
    return False


def _checked(name: str, links: dict[str, str]) -> str:
    """A name that stays inside, by itself and through links that were unpacked before it."""
    if "\0" in name or name.startswith("/"):
        raise BadPackage(f"{name[:100]!r} in the package leads out of it")
    plain = os.path.normpath(name)
    if ".." in name.split("/"):
        raise BadPackage(f"{name[:100]!r} in the package leads out of it")
    parts = plain.split("/")
    if len(parts) > DEPTH_MAX:
        raise BadPackage(f"{name[:100]!r} in the package is too deep")
    for end in range(1, len(parts) + 1):
        if "/".join(parts[:end]) in links:
            raise BadPackage(f"{name[:100]!r} in the package leads through a link")
    return plain


def _extract_file(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    source = tar.extractfile(member)
    assert source is not None
    mode = 0o555 if member.mode & stat.S_IXUSR else 0o444
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with source, open(os.open(path, flags, mode), "wb") as file:
        shutil.copyfileobj(source, file, COPY_BYTES)
        if file.tell() != member.size:
            raise BadPackage(f"{member.name[:100]!r} in the package is truncated")


def _make_read_only(root: Path) -> None:
    for place, _, _ in os.walk(root):
        os.chmod(place, 0o555)
