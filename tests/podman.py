"""A podman with a store of its own, and an image that is made of nothing but busybox."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.agent.images.runtimes import CONTAINERS
from tests.needs import need_program

IMAGE = "localhost/busybox:test"
APPLETS = (
    *("cat", "dd", "echo", "env", "grep", "httpd", "id", "kill", "ls", "mkdir", "nc", "ps"),
    *("seq", "sh", "sleep", "stat", "touch", "true"),
)


class Podman:
    """`env` is the setting that makes an agent use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        runc = shutil.which("runc") or "runc"
        self.command = [
            *("podman", "--runtime", runc, "--cgroup-manager", "cgroupfs"),
            *("--storage-driver", "vfs", "--root", str(folder / "store")),
            *("--runroot", str(folder / "run"), "--tmpdir", str(folder / "tmp")),
        ]
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
def podman() -> Iterator[Podman]:
    for program in ("podman", "runc", "busybox"):
        need_program(program)
    folder = Path(tempfile.mkdtemp(prefix="shoal-podman-"))
    try:
        made = Podman(folder)
        made.layer = root_file_system(folder / "root")
        made.run("import", "-", IMAGE, data=made.layer)
        yield made
        assert not made.containers(), "containers were left behind"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for group in Path("/sys/fs/cgroup").glob("*/libpod_parent"):
            for folder in (group / "conmon", group):
                with contextlib.suppress(OSError):  # another test still uses it
                    folder.rmdir()


def root_file_system(root: Path) -> bytes:
    """As a tar archive."""
    for name in ("bin", "etc", "tmp", "root", "dev", "proc", "sys"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    shutil.copy(shutil.which("busybox") or "/bin/busybox", root / "bin/busybox")
    for name in APPLETS:
        os.symlink("busybox", root / "bin" / name)
    return subprocess.run(
        ["tar", "-C", str(root), "-c", "."], capture_output=True, check=True
    ).stdout
