"""What is in a kept folder. A tenant may write there and the agent may be root, so no link is
followed, and no file of another user is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from shoal.machine.paths import GONE
from shoal.model.kept import FILES_MAX, PATH_PARTS_MAX, path_problem

NOTES_MAX = 20  # files that are left out, and named


class Stamp(NamedTuple):
    """A file with another stamp has changed."""

    size: int
    modified_ns: int
    inode: int


class Found(NamedTuple):
    files: dict[str, Stamp]
    notes: dict[str, str]  # files that cannot be kept, and why


def scan(root: Path | str, user: int | None = None) -> Found:
    """`user`: only files of this user. OSError if the folder itself cannot be read, or its mount is
    gone: then nothing says that a file was removed."""
    found = Found({}, {})
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _walk(handle, "", user, found, 1)
    finally:
        os.close(handle)
    return found


def _walk(folder: int, inside: str, user: int | None, found: Found, depth: int) -> None:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            path = f"{inside}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if depth >= PATH_PARTS_MAX:
                    _note(found, path, "it is too deep")
                    continue
                try:
                    inner = _open(entry.name, folder, os.O_DIRECTORY)
                except OSError as error:
                    _has_just_gone(error)
                    continue
                try:
                    _walk(inner, f"{path}/", user, found, depth + 1)
                finally:
                    os.close(inner)
                continue
            try:
                seen = entry.stat(follow_symlinks=False)
            except OSError as error:
                _has_just_gone(error)
                continue
            why = _problem(path, seen, user)
            if not why and len(found.files) >= FILES_MAX:
                why = f"only {FILES_MAX:,} files are kept"
            if why:
                _note(found, path, why)
            else:
                found.files[path] = Stamp(seen.st_size, seen.st_mtime_ns, seen.st_ino)


def _has_just_gone(error: OSError) -> None:
    if error.errno in GONE:
        raise error


def _problem(path: str, seen: os.stat_result, user: int | None) -> str:
    if stat.S_ISLNK(seen.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISREG(seen.st_mode):
        return "it is not a regular file"
    if user is not None and seen.st_uid != user:
        return "it belongs to another user"
    return path_problem(path)


def _note(found: Found, path: str, why: str) -> None:
    if len(found.notes) < NOTES_MAX:
        found.notes[path] = why


def _open(name: str, folder: int, flags: int = 0) -> int:
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=folder)


def open_folder(root: Path | str, path: str) -> tuple[int, str]:
    """A descriptor of the folder that holds this file, and the file's name in it. No link is
    followed on the way."""
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    *folders, name = path.split("/")
    for folder in folders:
        try:
            inner = _open(folder, here, os.O_DIRECTORY)
        finally:
            os.close(here)
        here = inner
    return here, name


def open_file(root: Path | str, path: str, user: int | None = None) -> int:
    """A descriptor of this file, reached without following a link."""
    folder, name = open_folder(root, path)
    try:
        handle = _open(name, folder)
    finally:
        os.close(folder)
    seen = os.fstat(handle)
    if not stat.S_ISREG(seen.st_mode) or (user is not None and seen.st_uid != user):
        os.close(handle)
        raise PermissionError(f"{path} is no longer a file of its own")
    return handle


def open_all(root: Path | str, files: dict[str, Stamp], user: int | None = None) -> dict[str, int]:
    """Descriptors of all these files at one moment: whoever replaces one of them later does not
    change what is read. OSError if one of them has changed already."""
    handles: dict[str, int] = {}
    try:
        for path, stamp in files.items():
            handles[path] = open_file(root, path, user)
            if stamp_of(handles[path]) != stamp:
                raise OSError(f"{path} is being written")
    except BaseException:
        for handle in handles.values():
            os.close(handle)
        raise
    return handles


def at_rest(before: Found | None, found: Found) -> bool:
    """Is nothing in the folder half written? A file that was there, and is as it was, is whole. So
    is one that was replaced, because that is done by renaming. A new one may still grow."""
    if before is None:
        return False
    for path, stamp in found.files.items():
        known = before.files.get(path)
        if known is None or (known != stamp and known.inode == stamp.inode):
            return False
    return True


def stamp_of(handle: int) -> Stamp:
    seen = os.fstat(handle)
    return Stamp(seen.st_size, seen.st_mtime_ns, seen.st_ino)
