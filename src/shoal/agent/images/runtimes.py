"""What runs images on this node, and the facts about the node that a container's command needs."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import pty
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import msgspec

from shoal.machine.kernel import NODE_MARK

CONTAINERS = "SHOAL_CONTAINERS"  # the command to use, with its general flags; "none" for none
KNOWN = ("podman", "docker", "apptainer")
CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
CDI_KIND = b"nvidia.com/gpu"
CDI_BYTES_MAX = 4 << 20
FILES_MAX = 1 << 20
PIDS_MAX = 32_768


class Runtime(msgspec.Struct, frozen=True):
    """`name` is one of KNOWN; `command` is how it is called on this node."""

    name: str
    command: tuple[str, ...]


class Gpus(enum.Enum):
    NONE = "none"  # no driver: GPUs that exist only as numbers, or none at all
    NAMED = "named"  # containers get them by name (CDI)
    UNNAMED = "unnamed"


class Facts(msgspec.Struct, frozen=True):
    """Of this node and its agent."""

    user: int
    group: int
    gpus: Gpus
    files: tuple[int, int]  # how many a process may open: usually, and at most
    processes: tuple[int, int]
    memory_mb: int
    limits: bool  # may podman limit the containers of this user?
    locked: int = -1  # bytes of memory that a process may lock; -1: all
    queues: bool = True  # has the machine /dev/mqueue? An ordinary user's podman insists on it


def find(environ: Mapping[str, str] = os.environ) -> Runtime | None:
    """Looks only into the PATH, so it costs nothing on a node that never runs an image."""
    wanted = shlex.split(environ.get(CONTAINERS, ""))
    for words in [wanted] if wanted else [[name] for name in KNOWN]:
        program = shutil.which(words[0], path=environ.get("PATH", os.defpath))
        name = os.path.basename(words[0])
        if program is not None and name in KNOWN:
            return Runtime(name, (program, *words[1:]))
    return None


def facts() -> Facts:
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Facts(
        user=os.geteuid(),
        group=os.getegid(),
        gpus=_gpus(),
        files=_within(resource.getrlimit(resource.RLIMIT_NOFILE), FILES_MAX),
        processes=_within(resource.getrlimit(resource.RLIMIT_NPROC), _pids_max()),
        memory_mb=pages * size >> 20,
        limits=os.geteuid() == 0 or _delegated(),
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
        queues=os.path.exists("/dev/mqueue"),
    )


def _within(limits: tuple[int, int], most: int) -> tuple[int, int]:
    """Podman lowers its own limits to this, and no container can have more."""
    soft, hard = (most if one == resource.RLIM_INFINITY else min(one, most) for one in limits)
    return soft, hard


def _pids_max() -> int:
    try:
        return int(Path("/proc/sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return PIDS_MAX


def _gpus() -> Gpus:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Gpus.NONE
    for folder in CDI_FOLDERS:
        for file in sorted(folder.glob("*.*")):
            try:
                with file.open("rb") as content:
                    if CDI_KIND in content.read(CDI_BYTES_MAX):
                        return Gpus.NAMED
            except OSError:
                continue
    return Gpus.UNNAMED


def _delegated() -> bool:
    """May an ordinary user set limits? Only below a group of version 2 that is the user's own."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line[3:] for line in lines if line.startswith("0::"))
        controllers = Path(f"/sys/fs/cgroup{own}/cgroup.controllers").read_text().split()
        return {"memory", "pids", "cpu"} <= set(controllers)
    except (OSError, StopIteration):
        return False


# Short commands of the runtime that the agent runs beside the members, and waits for.
#
# Code that waits for the agent's children must skip those in `pids()` and pass them to `ended`.


TEXT_BYTES_MAX = 16 * 1024
WINDOW = struct.pack("HHHH", 50, 250, 0, 0)  # rows and columns: lines that are not wrapped
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
LOST_CODE = 255


class Run:
    """One command: what it printed last, and its exit code when it has ended."""

    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self.process = process
        self.screen = screen
        self.text = ""
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()


class Runs:
    def __init__(self, node_mark: str) -> None:
        self._env = {NODE_MARK: node_mark}
        self._running: dict[int, Run] = {}

    async def run(
        self,
        words: Sequence[str],
        *,
        seconds: float,
        env: Mapping[str, str] | None = None,
        said: Callable[[str], None] | None = None,
    ) -> tuple[int, str]:
        """The exit code and the last of what it printed. `said` gets new text as it comes: the
        command prints to a terminal of its own, because most show progress only there."""
        screen, side = pty.openpty()
        try:
            ioctl(side, TIOCSWINSZ, WINDOW)
            process = subprocess.Popen(  # noqa: ASYNC220 (it returns when the program has begun)
                words,
                env={**os.environ, **self._env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=side,
                stderr=side,
                start_new_session=True,
            )
        except OSError:
            os.close(screen)
            raise
        finally:
            os.close(side)
        os.set_blocking(screen, False)
        run = self._running[process.pid] = Run(process, screen)
        loop = asyncio.get_running_loop()
        loop.add_reader(screen, self._read, run, said)
        try:
            code = await asyncio.wait_for(asyncio.shield(run.ended), seconds)
            self._read(run, said)
            return code, run.text
        except TimeoutError:
            return LOST_CODE, f"{run.text}\nit took longer than {seconds:.0f} s"
        finally:
            loop.remove_reader(screen)
            os.close(screen)
            if not run.ended.done():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _read(self, run: Run, said: Callable[[str], None] | None) -> None:
        try:
            data = os.read(run.screen, 1 << 16)
        except BlockingIOError:
            return
        except OSError:  # the command has closed its side
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(run.screen)
            return
        text = ESCAPES.sub("", data.decode(errors="replace")).replace("\r\n", "\n")
        run.text = (run.text + text)[-TEXT_BYTES_MAX:]
        if said is not None:
            said(text)

    def pids(self) -> set[int]:
        return set(self._running)

    def ended(self, pid: int, code: int) -> bool:
        """The process is no more and was waited for; was it ours?"""
        run = self._running.pop(pid, None)
        if run is None:
            return False
        run.process.returncode = code
        if not run.ended.done():
            run.ended.set_result(code if code >= 0 else 128 - code)
        return True
