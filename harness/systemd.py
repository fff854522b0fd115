"""A real systemd as the first process of namespaces of its own: it boots, runs units, and halts.

It sees this machine's files, except for /run and the folder of units. Its units are those that a
test installs, and the few targets that systemd itself needs: no unit of this machine starts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from harness.waiting import until

SYSTEMD = Path("/lib/systemd/systemd")
HOST_UNITS = Path("/lib/systemd/system")
UNITS = "/etc/systemd/system"
TARGETS = (
    *("sysinit", "basic", "shutdown", "umount", "final", "halt", "multi-user"),
    *("network", "network-online", "local-fs", "sockets", "timers", "paths", "slices"),
)
BOOT = f"""
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mount --bind "$1" {UNITS}
mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up
exec env -i container=other PATH="$PATH" SYSTEMD_UNIT_PATH={UNITS} {SYSTEMD} --system \\
    --unit=multi-user.target --log-target=console --show-status=no --default-standard-output=inherit
"""


def missing() -> str:
    """Why this machine cannot run one; empty if it can."""
    if os.geteuid() != 0:
        return "needs root: systemd gets namespaces of its own"
    if not SYSTEMD.exists() or shutil.which("nsenter") is None:
        return "systemd is not installed: apt-get install systemd"
    if _cgroup2() is None:
        return "needs a mounted cgroup2, in which systemd keeps its units"
    return ""


class Machine:
    """One machine with a systemd. `with` ends it by force; `halt` is an orderly shutdown."""

    def __init__(self, folder: Path) -> None:
        self.units = folder / "units"
        self.log = folder / "systemd.log"
        self._group: Path | None = None
        self._unshare: subprocess.Popen[bytes] | None = None
        self._init = 0

    def __enter__(self) -> Machine:
        self.units.mkdir(parents=True)
        for name in TARGETS:
            (self.units / f"{name}.target").symlink_to(HOST_UNITS / f"{name}.target")
        (self.units / "systemd-halt.service").symlink_to(HOST_UNITS / "systemd-halt.service")
        self.boot()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut_power()

    def boot(self) -> None:
        top = _cgroup2()
        assert top is not None
        self._group = top / f"shoal-systemd-{os.getpid()}"
        self._group.mkdir(exist_ok=True)
        flags = ("--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--ipc", "--net")
        # In the group before the namespace is made: it is the root of what systemd sees.
        into = f'echo $$ >"{self._group}/cgroup.procs" && exec unshare "$@"'
        with self.log.open("ab") as log:
            self._unshare = subprocess.Popen(
                [
                    "sh",
                    "-c",
                    into,
                    "sh",
                    *flags,
                    "--cgroup",
                    "--mount",
                    "sh",
                    "-c",
                    BOOT,
                    "sh",
                    self.units,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(lambda: self._find_init() > 0, "systemd to start", self._said)
        until(lambda: self.state() in ("running", "degraded"), "systemd to boot", self._said)

    def state(self) -> str:
        return self.call("systemctl", "is-system-running").stdout.strip()

    def call(
        self, *words: str | Path, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on that machine, as its root."""
        enter = ["nsenter", "-t", str(self._init), "-m", "-p", "-n", "-u", "-i", "--"]
        return subprocess.run(
            [*enter, *map(str, words)],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
            timeout=180,
            env={**os.environ, **(env or {})},
        )

    def shoal(self, *words: str | Path) -> str:
        done = self.call(sys.executable, "-m", "shoal.main", *words)
        assert done.returncode == 0, f"shoal {words}: {done.stdout}{done.stderr}\n{self._said()}"
        return done.stdout

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.call("systemctl", "show", "--value", "-p", name, unit).stdout.strip()

    def halt(self) -> None:
        """Shut down in order, as for a reboot; `boot` starts it again."""
        os.kill(self._init, signal.SIGRTMIN + 3)
        assert self._unshare is not None
        self._unshare.wait(timeout=150)
        self.cut_power()

    def cut_power(self) -> None:
        if self._unshare is not None:
            if self._init and self._unshare.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._init, signal.SIGKILL)
            self._unshare.kill()
            self._unshare.wait(timeout=30)
        self._unshare, self._init = None, 0
        if self._group is not None:
            until(self._remove_group, "its groups to be empty")

    def _remove_group(self) -> bool:
        assert self._group is not None
        for folder, _, _ in os.walk(self._group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        return not self._group.exists()

    def _find_init(self) -> int:
        """The child of unshare, as this machine numbers it."""
        assert self._unshare is not None
        pid = self._unshare.pid
        with contextlib.suppress(OSError, ValueError, IndexError):
            child = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            if b"systemd" in Path(f"/proc/{child}/cmdline").read_bytes().partition(b"\0")[0]:
                self._init = child
        return self._init

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


def _cgroup2() -> Path | None:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    return None
