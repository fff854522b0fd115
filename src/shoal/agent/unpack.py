"""Unpacks a package for good: read-only, and never outside of its own folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tarfile
from pathlib import Path

from shoal.model.job import PACKAGE_BYTES_MAX, PACKAGE_FILES_MAX

COPY_BYTES = 1 << 20


class BadPackage(Exception):
    """What arrived is not what was sent, or no package at all."""


class Damaged(BadPackage):
    """Its content has not the name that was asked for: fetched again it may have."""


def unpack(archive: Path, sha256: str, target: Path) -> None:
    """All of it or nothing: `target` is there when it is whole. Everything in it is checked, for
    whoever may submit a job may have made it by hand."""
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
        raise BadPackage(f"the package {sha256[:12]} is no proper archive: {error}") from None
    finally:
        remove(partial)


def remove(folder: Path) -> None:
    """Also what is read-only."""
    if not folder.is_dir():
        return
    for place, _, _ in os.walk(folder):
        os.chmod(place, 0o700)
    shutil.rmtree(folder)


def _extract(archive: Path, root: Path) -> None:
    links: set[str] = set()
    total = count = 0
    with tarfile.open(archive, mode="r:") as tar:
        for member in tar:
            count += 1
            total += member.size
            if count > PACKAGE_FILES_MAX + 1 or total > PACKAGE_BYTES_MAX:
                raise BadPackage("the package holds more than a package may")
            name = _checked(member.name, links)
            path = root / name
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.isreg():
                _extract_file(tar, member, path)
            elif member.issym():
                _checked(os.path.join(os.path.dirname(name), member.linkname), set(), link=True)
                os.symlink(member.linkname, path)
                links.add(name)
            else:
                raise BadPackage(f"{name[:100]!r} in the package is neither file nor folder")


def _checked(name: str, links: set[str], *, link: bool = False) -> str:
    """A name that leads nowhere else, by itself or through a link that was unpacked before."""
    if "\0" in name or name.startswith("/"):
        raise BadPackage(f"{name[:100]!r} in the package leads out of it")
    plain = os.path.normpath(name)
    if plain == ".." or plain.startswith("../") or (not link and ".." in name.split("/")):
        raise BadPackage(f"{name[:100]!r} in the package leads out of it")
    parts = plain.split("/")
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
            raise BadPackage(f"{member.name[:100]!r} in the package ends too soon")


def _make_read_only(root: Path) -> None:
    for place, _, _ in os.walk(root):
        os.chmod(place, 0o555)
