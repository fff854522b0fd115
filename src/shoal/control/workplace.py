"""A folder in which one controller prepares files of a store that several heads may see.

Every change of the store begins with a look at this folder, or is a rename out of it. The next
controller removes it, so one that was stopped, lost its lease and continues changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

CLAIMS_MAX = 100


class Workplace:
    """One for each life of a store; `root/N`, with the highest N of all."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path: Path | None = None
        with contextlib.suppress(OSError):  # a full disk: the first file tries again
            self._path = _claim(root)

    @property
    def path(self) -> Path:
        """OSError: another controller keeps the store by now."""
        if self._path is None:
            self._path = _claim(self._root)
        if not self._path.is_dir():
            raise OSError(errno.ESTALE, "another head keeps these files by now")
        return self._path

    def write(self, place: Path, data: bytes) -> None:
        """Replace a file of the store, whole or not at all."""
        temporary = self.path / f"{place.name}.new"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        temporary.replace(place)


def _claim(root: Path) -> Path:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    others = list(root.iterdir())
    number = max((int(one.name) for one in others if one.name.isdigit()), default=0)
    for mine in range(number + 1, number + CLAIMS_MAX):
        with contextlib.suppress(FileExistsError):  # another head has begun at the same moment
            (root / str(mine)).mkdir(mode=0o700)
            break
    for left in others:
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
    return root / str(mine)
