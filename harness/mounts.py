"""File systems of a test: a folder that turns read-only at one instant, and one that hangs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.waiting import until


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


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[None]:
    """An empty one of so many bytes is mounted here."""
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


class Fuse:
    """A folder at another place, by a daemon of its own: whoever asks it hangs while it stands
    still, and gets an error when it is gone."""

    def __init__(self, source: Path, path: Path) -> None:
        self.source, self.path = source, path
        self.mount()

    def mount(self) -> None:
        self._daemon = subprocess.Popen(["bindfs", "-f", str(self.source), str(self.path)])
        until(
            lambda: self._daemon.poll() is not None or os.path.ismount(self.path),
            "bindfs does not mount",
        )
        if self._daemon.returncode is not None:
            pytest.skip("bindfs cannot mount here")

    def unmount(self) -> None:
        """Those who wait for it still do."""
        subprocess.run(["umount", "-l", str(self.path)], check=False)

    def kill(self) -> None:
        self._daemon.kill()
        self._daemon.wait()

    def stop(self) -> None:
        self._daemon.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._daemon.send_signal(signal.SIGCONT)


@contextmanager
def fuse() -> Iterator[Fuse]:
    if shutil.which("bindfs") is None or not os.path.exists("/dev/fuse") or os.geteuid():
        pytest.skip("needs root, /dev/fuse and bindfs: apt-get install bindfs")
    with tempfile.TemporaryDirectory(prefix="shoal-test-") as aside:
        source, path = Path(aside, "source"), Path(aside, "mount")
        source.mkdir()
        path.mkdir()
        mount = Fuse(source, path)
        try:
            yield mount
        finally:
            mount.unmount()
            mount.kill()


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
