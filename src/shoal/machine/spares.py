"""Folders that were made for somebody else, who has left no trace in them.

To rename a folder takes a tenth of the time that making and removing one takes. On ext4 it is much
less still: for a new one, the kernel passes over all that were removed in the last five seconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from shoal.machine.files import make_folder

SPARE_MAX = 64


class Spares:
    """Of one kind: each has this mode and, if it has `files`, an empty one of each of these names,
    mode 600. Those of a tenant's user have these `folders` as well, and are never another's: its
    own are the files and folders inside, or where there are none, the folder itself."""

    def __init__(
        self,
        place: Path,
        mode: int = 0o700,
        files: tuple[str, ...] = (),
        folders: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """`place`: where they are kept; nothing of an earlier life is used. `folders`: with the
        empty folders of ours that may be in each."""
        self._place, self._mode, self._files = str(place), mode, files
        self._folders = folders or {}
        self._own = os.geteuid()
        self._free: dict[int, list[str]] = {}  # by user; 0: ours
        self._made = 0
        shutil.rmtree(place, ignore_errors=True)

    def make(self, path: str, user: int = 0) -> None:
        """One of the user's, or a new one, unless there is one already."""
        if free := self._free.get(user):
            with contextlib.suppress(OSError):  # another disk, or it is there
                os.rename(free[-1], path)
                free.pop()
                return
        make_folder(path, self._mode)

    def take(self, path: str, user: int = 0) -> bool:
        """Whoever had it has ended, with nothing of it open. False: it cannot be used again."""
        free = self._free.setdefault(user, [])
        with contextlib.suppress(OSError):
            if len(free) < SPARE_MAX and self._is_as_new(path, user or self._own):
                spare = f"{self._place}/{self._made}"
                try:
                    os.rename(path, spare)
                except FileNotFoundError:
                    make_folder(self._place)
                    os.rename(path, spare)
                self._made += 1
                free.append(spare)
                return True
        return False

    def _is_as_new(self, path: str, user: int) -> bool:
        found = os.lstat(path)
        if found.st_mode != stat.S_IFDIR | self._mode:
            return False
        if found.st_uid != (self._own if self._files else user):
            return False
        folders = self._folders if user != self._own else {}
        if sorted(os.listdir(path)) != sorted((*self._files, *folders)):
            return False
        for name, ours in folders.items():
            if not _is_folder(f"{path}/{name}", user):
                return False
            for inner in os.listdir(f"{path}/{name}"):
                if inner not in ours or not _is_folder(f"{path}/{name}/{inner}", self._own):
                    return False
        for name in self._files:
            file = os.lstat(f"{path}/{name}")
            if file.st_mode != stat.S_IFREG | 0o600 or file.st_nlink != 1 or file.st_uid != user:
                return False
            if file.st_size:
                os.truncate(f"{path}/{name}", 0)
        return True


def _is_folder(path: str, user: int) -> bool:
    """Of this user alone. What is ours, no other user has put anything into."""
    found = os.lstat(path)
    return found.st_mode == stat.S_IFDIR | 0o700 and found.st_uid == user
