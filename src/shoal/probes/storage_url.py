"""A storage that is a URL: objects under a new prefix of ours, by fsspec, with the credentials in
the agent's environment."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from shoal.probes.storage_place import Count, Problem

STREAMS = 8  # requests at the same time: one waits more than it works
OBJECT_BYTES = 8 * 1024 * 1024
OBJECTS_EACH = 8  # of a stream; then they are written again
SMALL_BYTES = 4096
SAID_MAX = 160


class Objects:
    def __init__(self, target: str, name: str) -> None:
        self.notes = [f"{STREAMS} requests at a time, objects of {OBJECT_BYTES >> 20} MiB"]
        self._target = target
        with _explained(target):
            self._fs, root = _file_system(target)
            self._root = f"{root.rstrip('/')}/{name}"
            # The first request finds out about credentials, and whether the bucket is there.
            self._fs.pipe_file(f"{self._root}/first", b"shoal")
        self._written = [0] * STREAMS

    def write(self, phase_s: float) -> Count:
        content = os.urandom(OBJECT_BYTES)

        def one(stream: int, until: float) -> int:
            done = 0
            while not done or time.monotonic() < until:
                path = f"{self._root}/data{stream}-{done % OBJECTS_EACH}"
                self._fs.pipe_file(path, os.urandom(16) + content[16:])
                done += 1
            self._written[stream] = min(done, OBJECTS_EACH)
            return done * OBJECT_BYTES

        return self._together(one, phase_s)

    def read(self, phase_s: float) -> Count:
        def one(stream: int, until: float) -> int:
            done = number = 0
            while not done or time.monotonic() < until:
                path = f"{self._root}/data{stream}-{number % self._written[stream]}"
                done += len(self._fs.cat_file(path))
                number += 1
            return done

        return self._together(one, phase_s)

    def small(self, phase_s: float) -> Count:
        content = os.urandom(SMALL_BYTES)

        def one(stream: int, until: float) -> int:
            done = 0
            while not done or time.monotonic() < until:
                path = f"{self._root}/small{stream}-{done}"
                self._fs.pipe_file(path, content)
                self._fs.cat_file(path)
                self._fs.rm_file(path)
                done += 1
            return done

        return self._together(one, phase_s)

    def remove(self) -> None:
        with _explained(self._target):
            _remove(self._fs, self._root)

    def _together(self, one: Callable[[int, float], int], phase_s: float) -> Count:
        began = time.monotonic()
        with _explained(self._target), ThreadPoolExecutor(STREAMS) as pool:
            running = [pool.submit(one, stream, began + phase_s) for stream in range(STREAMS)]
            done = sum(each.result() for each in running)
        return Count(done, time.monotonic() - began)


def _file_system(target: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(target, skip_instance_cache=True, use_listings_cache=False)
    return fs, root


def _remove(fs: Any, root: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        fs.invalidate_cache()
        fs.rm(root, recursive=True)


def remove_left(target: str, name: str) -> None:
    fs, root = _file_system(target)
    _remove(fs, f"{root.rstrip('/')}/{name}")


class _explained(contextlib.AbstractContextManager[None]):  # noqa: N801
    """Whatever a library raises becomes one line."""

    def __init__(self, target: str) -> None:
        self._target = target

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, Problem):
            return
        raise _problem(self._target, error) from None


def _problem(target: str, error: Exception) -> Problem:
    scheme = urlsplit(target).scheme
    said = next(iter(str(error).splitlines()), "")[:SAID_MAX] or type(error).__name__
    if isinstance(error, ImportError):
        return Problem(f"this node cannot use {scheme}:// ({said}): pip install 'shoal[volumes]'")
    refused = isinstance(error, PermissionError) or getattr(error, "errno", 0) == errno.EACCES
    if refused or "Credential" in type(error).__name__:
        return Problem(f"{target} must not be written with the agent's credentials ({said})")
    if isinstance(error, FileNotFoundError):
        return Problem(f"there is nothing at {target} ({said})")
    return Problem(f"{target} cannot be used: {said}")
