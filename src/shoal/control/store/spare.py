"""Spare room on the log's disk: freed when the disk is full, so that cancel still works."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger("shoal.control")

SPARE_BYTES = 16 * 1024 * 1024
SHARE_OF_DISK = 8  # at most one part in this many of a small disk
AGAIN_FACTOR = 3  # it is taken back when this many times its size is free


class Spare:
    """A file that only holds room. While that room is freed, the store is `tight`."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.tight = False
        if path is not None and not self._taken():
            self.take()

    def give_up(self) -> bool:
        """Free the room; False if there is none left."""
        if self._path is None or not self._taken():
            return False
        os.truncate(self._path, 0)
        self.tight = True
        return True

    def take(self) -> bool:
        """Take the room back, if the disk has enough."""
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
