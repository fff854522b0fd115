"""Where the shards of a volume are, and how a reader gets the one that it needs next."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from fnmatch import fnmatch

from shoal.data.shards import DataError, kind_of
from shoal.model.volume import READERS, VARIABLE

KEPT_BYTES = 16 << 30  # of shards from a URL that are kept on the disk


class Source:
    """A folder whose files are all there."""

    def __init__(self, label: str, root: str, sizes: dict[str, int], match: str) -> None:
        self.label, self.root = label, root
        self.sizes = {
            name: sizes[name]
            for name in sorted(sizes)
            if (not match or fnmatch(name, match)) and kind_of(name)
        }
        self.names = tuple(self.sizes)
        if not self.names:
            which = f"shards that match {match!r}" if match else "shards"
            raise DataError(f"{label} has no {which} (.tar, .jsonl, .parquet)")

    @property
    def identity(self) -> str:
        """Of the same shards, wherever they are."""
        text = "\0".join(f"{name}\0{size}" for name, size in self.sizes.items())
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def path(self, name: str) -> str:
        """When the file is there."""
        return os.path.join(self.root, name)

    def coming(self, names: Sequence[str], *, waited: bool) -> None:
        """These are next. `waited`: the loop needed the first of them, and it was not ready."""


class Remote(Source):
    """A URL: shards are copied to a temporary folder, and the last ones are kept there."""

    def __init__(self, url: str, match: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise DataError(f"{url} needs fsspec: pip install 'shoal[volumes]'") from None
        try:
            self._fs, self._root = url_to_fs(url)
            found = self._fs.find(self._root, detail=True)
        except Exception as error:  # of any library that fsspec uses
            raise DataError(f"{url}: {_first_line(error)}") from None
        root = self._root.rstrip("/")
        if kind_of(root):  # one shard
            self._root, _, _ = root.rpartition("/")
            found = {root: found.get(root) or self._fs.info(root)}
        self._root = self._root.rstrip("/")
        sizes = {name[len(self._root) :].lstrip("/"): one["size"] for name, one in found.items()}
        super().__init__(url, "", sizes, match)
        self._kept: deque[str] = deque()
        self._lock = threading.Lock()
        self._folder, self._pid = "", 0

    def path(self, name: str) -> str:
        with self._lock:
            if self._pid != os.getpid():  # the worker of a loader has a folder of its own
                self._folder, self._pid = tempfile.mkdtemp(prefix="shoal-data-"), os.getpid()
                weakref.finalize(self, _remove, self._folder, self._pid)
        path = os.path.join(self._folder, name)
        if not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                self._fs.get_file(f"{self._root}/{name}", f"{path}.part")
            except Exception as error:  # of any library that fsspec uses
                raise DataError(f"{self.label}: {name}: {_first_line(error)}") from None
            os.rename(f"{path}.part", path)
            self._keep(name)
        return path

    def _keep(self, name: str) -> None:
        with self._lock:
            self._kept.append(name)
            while sum(self.sizes[kept] for kept in self._kept) > KEPT_BYTES and len(self._kept) > 4:
                os.unlink(os.path.join(self._folder, self._kept.popleft()))


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork of the process that uses it
        shutil.rmtree(folder, ignore_errors=True)


def find(place: str, match: str) -> Source:
    """By the name of a volume, a path or a URL."""
    if "://" in place:
        return Remote(place, match)
    folder = os.environ.get(VARIABLE + place.upper(), "")
    label = f"volume {place}" if folder else place
    if not folder and os.sep not in place and not os.path.exists(place):
        raise DataError(
            f"there is no volume {place!r} (${VARIABLE}{place.upper()} is not set) and no folder "
            f"of this name: run with --volume SOURCE:{place}, or name a folder"
        )
    folder = os.path.abspath(folder or place)
    if os.path.isfile(folder):
        folder, name = os.path.split(folder)
        return Source(label, folder, {name: os.stat(place).st_size}, match)
    if not os.path.isdir(folder):
        raise DataError(f"{label}: {folder} is not a folder")
    if os.path.exists(os.path.join(folder, READERS)):
        from shoal.data.coming import Coming, Whole

        with contextlib.suppress(Whole):
            return Coming(label, folder, match)
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):
                sizes[os.path.relpath(path, folder)] = os.stat(path).st_size
    return Source(label, folder, sizes, match)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300] or type(error).__name__
