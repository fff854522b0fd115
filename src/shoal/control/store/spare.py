"""Spare room on the disk of the log: given up when the disk is full, so that cancel still works."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger("shoal.control")

SPARE_BYTES = 16 * 1024 * 1024
SHARE_OF_DISK = 8  # on a small one no more than this part of it
AGAIN_FACTOR = 3  # it is taken back when there is so many times as much


class Spare:
    """A file that holds nothing but room. While it is given up the store is `tight`."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.tight = False
        if path is not None and not self._taken():
            self.take()

    def give_up(self) -> bool:
        """False if there is nothing left to give."""
        if self._path is None or not self._taken():
            return False
        os.truncate(self._path, 0)
        self.tight = True
        return True

    def take(self) -> bool:
        """If the disk has room enough for it."""
        if self._path is None:
            return False
        try:
            disk = os.statvfs(self._path.parent)
            wanted = min(SPARE_BYTES, disk.f_blocks * disk.f_frsize // SHARE_OF_DISK)
            if disk.f_bavail * disk.f_frsize < AGAIN_FACTOR * wanted:
                return False
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(handle, 0, wanted)
            finally:
                os.close(handle)
        except OSError as error:
            log.error("no spare room can be kept in %s: %s", self._path, error)
            return False
        self.tight = False
        return True

    def _taken(self) -> bool:
        try:
            return self._path is not None and self._path.stat().st_size > 0
        except OSError:
            return False
