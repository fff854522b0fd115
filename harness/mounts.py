"""File systems of a test: a folder that turns read-only at one instant, under running processes."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Nobody can write below `path`. It is mounted read-only somewhere else and then bound here:
    a mount that turns read-only in its place is busy if a process opened a file to write."""
    with tempfile.TemporaryDirectory(prefix="shoal-test-") as aside:
        _mount("--bind", str(path), aside)
        try:
            _mount("-o", "remount,bind,ro", aside)
            _mount("--bind", aside, str(path))
        finally:
            subprocess.run(["umount", "-l", aside], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
