"""A docker daemon of the tests' own, with its own store and socket, and no bridge or firewall."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.waiting import WAIT_S

from shoal.agent.images.runtimes import CONTAINERS
from tests.needs import need_program, need_root
from tests.podman import IMAGE, root_file_system


class Docker:
    """`env` is the setting that makes an agent use it."""

    daemon: subprocess.Popen[bytes]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.command = ["docker", "--host", f"unix://{folder}/socket"]
        self.layer = b""  # the file system of the image, as a tar archive
        self.env = {CONTAINERS: shlex.join(self.command)}

    def run(self, *words: str, data: bytes | None = None) -> str:
        done = subprocess.run(
            [*self.command, *words], input=data, capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def containers(self) -> list[str]:
        return self.run("ps", "--all", "--format={{.Names}}").split()


@contextmanager
def docker() -> Iterator[Docker]:
    need_root()
    for program in ("dockerd", "docker", "busybox"):
        need_program(program)
    folder = Path(tempfile.mkdtemp(prefix="shoal-docker-"))
    made = Docker(folder)
    try:
        with daemon(made) as made.daemon:
            made.layer = root_file_system(folder / "root")
            made.run("import", "-", IMAGE, data=made.layer)
            yield made
            if made.daemon.poll() is None:
                assert not made.containers(), "containers were left behind"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def daemon(made: Docker) -> Iterator[subprocess.Popen[bytes]]:
    folder = made.folder
    words = [
        *("dockerd", "--host", f"unix://{folder}/socket", "--pidfile", f"{folder}/pid"),
        *("--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"),
        *("--storage-driver", "vfs", "--exec-opt", "native.cgroupdriver=cgroupfs"),
        *("--bridge=none", "--iptables=false", "--ip6tables=false"),
    ]
    log = folder / "log"
    with log.open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + WAIT_S
        while subprocess.run([*made.command, "version"], capture_output=True).returncode:
            if process.poll() is not None:
                reason = (log.read_text().splitlines() or ["it says nothing"])[-1]
                pytest.skip(f"dockerd cannot start here: {reason}")
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(WAIT_S)
        _end_shims(folder)
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if (place := line.split()[4]).startswith(f"{folder}/"):
                subprocess.run(["umount", "--lazy", place], check=False)


def _end_shims(folder: Path) -> None:
    """A shim, which is the parent of a container's processes, outlives a daemon that was killed."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{folder}/".encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                os.kill(int(name), signal.SIGKILL)
