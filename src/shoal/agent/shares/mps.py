"""NVIDIA's MPS: one daemon for each shared GPU and Unix user, as a child of the agent.

A daemon that root runs for all users lets the programs of one user wait until those of another
have ended. With a daemon each, users share the GPU by turns, and one user's fault cannot end the
programs of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from shoal.agent.inherited import inherited_env
from shoal.agent.shares.rules import daemon_env
from shoal.kernel import NODE_MARK

log = logging.getLogger("shoal.agent")

PROGRAM = "nvidia-cuda-mps-control"
READY = "control"  # the daemon's socket in its folder
READY_S = 30.0
RETRY_S = 60.0  # after a failure; until then members go without
LOOK_S = 0.01
RUN = Path("/run")


class Daemon:
    __slots__ = ("folder", "process", "ready")

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.process = process
        self.ready = False


class MpsDaemons:
    """Started when a member needs one. Where none can be, `failed` says why."""

    def __init__(self, node: Path, program: str | None = None, own: Sequence[int] = ()) -> None:
        """`own`: the machine's numbers of the node's GPUs, if they are not 0, 1, ..."""
        self._own = own
        self._node = node
        self._program = program if program is not None else shutil.which(PROGRAM) or ""
        # Where tenants may enter, which they may not in the node's folder.
        mark = hashlib.sha256(str(node).encode()).hexdigest()[:12]
        self._root = RUN / f"shoal-mps-{mark}" if os.access(RUN, os.W_OK) else node / "mps"
        self._daemons: dict[tuple[int, int], Daemon] = {}
        self.failed = "" if self._program else f"{PROGRAM} is not installed"
        self._retry_at = 0.0

    def here(self, gpu: int, uid: int) -> str | None:
        """The folder of the daemon if it is ready; "" if there can be none."""
        if not self._program or time.monotonic() < self._retry_at:
            return ""
        daemon = self._daemons.get((gpu, uid))
        return str(daemon.folder) if daemon is not None and daemon.ready else None

    async def get(self, gpu: int, uid: int) -> str:
        """A member that starts before its daemon is ready would run without limits."""
        found = self.here(gpu, uid)
        if found is not None:
            return found
        try:
            daemon = self._daemons.get((gpu, uid)) or self._start(gpu, uid)
            async with asyncio.timeout(READY_S):
                while not (daemon.folder / READY).exists():
                    if (gpu, uid) not in self._daemons:
                        raise OSError(f"it ended: {_last_line(daemon.folder)}")
                    await asyncio.sleep(LOOK_S)
        except OSError as error:  # a timeout, too
            self.failed = str(error) or f"it was not ready after {READY_S:.0f} s"
            self._retry_at = time.monotonic() + RETRY_S
            log.warning("shares of GPUs go without MPS: %s", self.failed)
            self._end(gpu, uid)
            return ""
        daemon.ready, self.failed = True, ""
        return str(daemon.folder)

    def _start(self, gpu: int, uid: int) -> Daemon:
        folder = self._root / f"{gpu}-{uid}"
        self._root.mkdir(exist_ok=True)
        self._root.chmod(0o711)  # whatever the umask
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier life
        folder.mkdir(mode=0o700)
        who = {"user": uid, "group": uid, "extra_groups": []} if uid else {}
        if uid:
            os.chown(folder, uid, uid)
        process = subprocess.Popen(
            [self._program, "-f"],
            # As a job's: a daemon's environment can be read by its user.
            env={
                **inherited_env(),
                **daemon_env(self._own[gpu] if self._own else gpu, str(folder)),
                NODE_MARK: str(self._node),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **who,  # type: ignore[call-overload]
        )
        daemon = self._daemons[gpu, uid] = Daemon(folder, process)
        log.info("MPS for GPU %d and user %d: process %d", gpu, uid, process.pid)
        return daemon

    def pids(self) -> set[int]:
        return {daemon.process.pid for daemon in self._daemons.values()}

    def ended(self, pid: int, code: int) -> bool:
        """The process is no more and was waited for; was it ours?"""
        for key, daemon in list(self._daemons.items()):
            if daemon.process.pid == pid:
                daemon.process.returncode = code
                log.warning("MPS for GPU %d ended with code %d", key[0], code)
                self._end(*key)
                return True
        return False

    def _end(self, gpu: int, uid: int) -> None:
        daemon = self._daemons.pop((gpu, uid), None)
        if daemon is None:
            return
        if daemon.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.process.pid, signal.SIGKILL)
            daemon.process.returncode = -signal.SIGKILL  # the agent waits for all its children
        shutil.rmtree(daemon.folder, ignore_errors=True)

    def close(self) -> None:
        for key in list(self._daemons):
            self._end(*key)
        shutil.rmtree(self._root, ignore_errors=True)


def _last_line(folder: Path) -> str:
    with contextlib.suppress(OSError):
        lines = (folder / "control.log").read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return "it said nothing"
