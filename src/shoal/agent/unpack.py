"""Unpacks a package: read-only, and never outside of its own folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tarfile
from pathlib import Path

from shoal.model.job import PACKAGE_BYTES_MAX, PACKAGE_FILES_MAX

COPY_BYTES = 1 << 20
BLOCK_BYTES = tarfile.BLOCKSIZE
# What `shoal.packing` writes. Everything else is refused before `tarfile` sees it, because
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
