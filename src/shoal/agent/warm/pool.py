"""Keeps a few warm interpreters for as long as they may be needed and memory allows."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import msgspec

from shoal.agent.confine.limits import joining
from shoal.agent.warm import zygote as zygote_program
from shoal.agent.warm.rules import Recipe, shadowed
from shoal.machine.cgroups import Group
from shoal.machine.kernel import CORES, NODE_MARK, limit_cores

log = logging.getLogger("shoal.agent")

ZYGOTES_MAX = 2
UNUSED_S = 600.0
IN_USE_S = 60.0  # running members are looked at more often than this
# A fork takes about 10 ms; one that takes longer costs more than a cold start.
FORK_S_MAX = 2.0
# Room in a member's /proc/PID/environ: as much of its environment as fits is shown there.
ROOM_BYTES = 48 * 1024
START_MEMORY_MB = 2048
KEEP_MEMORY_MB = 768
FAILURES_MAX = 5
REMEMBERED_MAX = 256
ANSWER_BYTES_MAX = 256 * 1024
CONTAINER = Path("/sys/fs/cgroup")


class Answer(msgspec.Struct, frozen=True):
    """A zygote's answer: it is ready (names), a member's process id, or what went wrong."""

    names: frozenset[str] | None = None
    seconds: float = 0.0
    pid: int = 0
    module: str = ""
    why: str = ""


class Zygote:
    def __init__(self, recipe: Recipe, process: subprocess.Popen[bytes], control: socket.socket):
        self.recipe = recipe
        self.process = process
        self.control = control
        self.names: frozenset[str] | None = None  # of the modules it has imported, once it is ready
        self.needed_at = time.monotonic()


class WarmPool:
    def __init__(self, node_mark: str) -> None:
        self._node_mark = node_mark
        self._zygotes: dict[str, Zygote] = {}
        self._failures: dict[str, int] = {}
        self._harmful: set[str] = set()  # modules that a zygote cannot hold

    def fork(
        self,
        recipe: Recipe,
        env: dict[str, str],
        workdir: str,
        output: int,
        group: Group | None = None,
    ) -> int | None:
        """A member's process id, or None if it has to start cold. It waits until it is in the
        group."""
        zygote = self._zygotes.get(recipe.key)
        if zygote is None:
            return None
        self._listen(zygote)
        if zygote.names is None or recipe.key not in self._zygotes:
            return None
        hidden = shadowed(recipe.folder, zygote.names)
        if hidden:
            log.info("a cold start, because %s hides a preloaded module", hidden)
            return None
        order = {
            "argv": recipe.argv,
            "target": recipe.target,
            "module": recipe.module,
            "args": recipe.args,
            "workdir": workdir,
            "env": env,
        }
        answer = _ask(zygote.control, msgspec.json.encode(order), output, group)
        if not answer.pid:
            log.warning("a warm interpreter is stopped: %s", answer.why)
            self._end(zygote)
            return None
        zygote.needed_at = time.monotonic()
        return answer.pid

    def want(self, recipe: Recipe, modules: tuple[str, ...]) -> None:
        """A member of this kind is running and has loaded modules that take long to import."""
        modules = tuple(module for module in modules if not self._is_harmful(module))
        zygote = self._zygotes.get(recipe.key)
        if zygote is not None:
            zygote.needed_at = time.monotonic()
        elif (
            modules
            and self._failures.get(recipe.key, 0) < FAILURES_MAX
            and available_memory_mb() > START_MEMORY_MB
            and self._make_room()
        ):
            self._start(recipe, modules)

    def tend(self) -> None:
        """Read all answers. Stop interpreters that are not needed, or if memory is short."""
        now = time.monotonic()
        for zygote in list(self._zygotes.values()):
            self._listen(zygote)
            if now - zygote.needed_at > UNUSED_S:
                self._end(zygote)
        if self._zygotes and available_memory_mb() < KEEP_MEMORY_MB:
            log.warning("memory is short: warm interpreters are stopped")
            self.close()

    def pids(self) -> set[int]:
        return {zygote.process.pid for zygote in self._zygotes.values()}

    def ready(self) -> int:
        return sum(zygote.names is not None for zygote in self._zygotes.values())

    def ended(self, pid: int, code: int) -> None:
        """The process has ended and was reaped."""
        for zygote in list(self._zygotes.values()):
            if zygote.process.pid == pid:
                zygote.process.returncode = code
                self._listen(zygote)  # it may have said why
                self._end(zygote)

    def close(self) -> None:
        for zygote in list(self._zygotes.values()):
            self._end(zygote)

    def _start(self, recipe: Recipe, modules: tuple[str, ...]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {"agent": os.getpid(), "control": theirs.fileno(), "modules": modules}
        env = {
            **recipe.env,
            NODE_MARK: self._node_mark,
            zygote_program.SETTINGS: msgspec.json.encode(settings).decode(),
            zygote_program.ROOM: "x" * ROOM_BYTES,
        }
        program = str(Path(zygote_program.__file__))
        # It ignores no signal that a cold member does not: it cannot undo all of them itself.
        words = [*joining(None, {}), recipe.interpreter, *recipe.options]
        try:
            process = subprocess.Popen(
                [*words, program, self._node_mark],
                cwd=recipe.place,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        except OSError as error:
            log.warning("no warm interpreter: %s", error)
            self._fail(recipe.key)
            ours.close()
            return
        finally:
            theirs.close()
        limit_cores(process.pid, CORES[0])
        ours.setblocking(False)
        self._zygotes[recipe.key] = Zygote(recipe, process, ours)
        log.info("starting a warm interpreter: process %d, %s", process.pid, " ".join(modules))

    def _listen(self, zygote: Zygote) -> None:
        if zygote.names is not None:
            return
        answer = _receive(zygote.control)
        if answer is None:
            return
        if answer.names is not None:
            zygote.names = answer.names
            zygote.needed_at = time.monotonic()
            log.info("process %d is warm after %.1f s", zygote.process.pid, answer.seconds)
            return
        log.warning("no warm interpreter: %s %s", answer.module, answer.why)
        if answer.module:
            self._harmful.add(answer.module)
        self._fail(zygote.recipe.key)
        self._end(zygote)

    def _is_harmful(self, module: str) -> bool:
        """Importing a module also imports the packages that contain it."""
        return any(f"{module}.".startswith(f"{harmful}.") for harmful in self._harmful)

    def _fail(self, key: str) -> None:
        while len(self._failures) >= REMEMBERED_MAX:
            self._failures.pop(next(iter(self._failures)))
        self._failures[key] = self._failures.get(key, 0) + 1

    def _make_room(self) -> bool:
        """Stop the least recently needed one, unless all are in use."""
        if len(self._zygotes) < ZYGOTES_MAX:
            return True
        oldest = min(self._zygotes.values(), key=lambda zygote: zygote.needed_at)
        if time.monotonic() - oldest.needed_at < IN_USE_S:
            return False
        self._end(oldest)
        return True

    def _end(self, zygote: Zygote) -> None:
        self._zygotes.pop(zygote.recipe.key, None)
        zygote.control.close()
        if zygote.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(zygote.process.pid, signal.SIGKILL)
            zygote.process.returncode = -signal.SIGKILL  # the agent reaps it, Popen need not


def available_memory_mb() -> int:
    """Of the machine, or of this container if that has less."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) // 1024
    with contextlib.suppress(OSError, ValueError):  # `max` means no limit
        limit = int((CONTAINER / "memory.max").read_text())
        used = int((CONTAINER / "memory.current").read_text())
        for line in (CONTAINER / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])  # the kernel frees this when memory is short
        available = min(available, (limit - used) // 1024**2)
    return available


def _ask(control: socket.socket, order: bytes, output: int, group: Group | None) -> Answer:
    """If no answer comes, the pipe is closed and a member that was forked all the same ends before
    it has done anything. So nothing is ever started twice."""
    content = os.memfd_create("order", os.MFD_CLOEXEC)
    wait, go = os.pipe()
    try:
        with open(content, "wb", closefd=False) as file:
            file.write(order)
        control.settimeout(FORK_S_MAX)
        socket.send_fds(control, [b"fork"], [content, output, wait])
        answer = msgspec.json.decode(control.recv(ANSWER_BYTES_MAX), type=Answer)
        control.setblocking(False)
        if answer.pid:
            # Raises if it is not our child; does not reap it if it has ended.
            os.waitid(os.P_PID, answer.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if group is not None:
                group.add(answer.pid)
            os.write(go, b"g")
        return answer
    except (OSError, msgspec.DecodeError) as error:
        return Answer(why=str(error) or "no answer")
    finally:
        for handle in (content, wait, go):
            os.close(handle)


def _receive(control: socket.socket) -> Answer | None:
    try:
        return msgspec.json.decode(control.recv(ANSWER_BYTES_MAX), type=Answer)
    except BlockingIOError:
        return None
    except (OSError, msgspec.DecodeError):
        return Answer(why="ended while it was starting")
