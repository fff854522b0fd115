"""The agent's side of the launcher (enter.py): starts it, and has it start confined processes."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from shoal.agent.faults import CannotStart
from shoal.agent.warm.pool import ANSWER_BYTES_MAX, Answer
from shoal.machine.kernel import NODE_MARK
from shoal.model.job import Fault

log = logging.getLogger("shoal.agent")

START_S_MAX = 20.0  # a loaded machine may take long to fork; a disk may take long to answer
WHY_BYTES_MAX = 4096


class Ends(NamedTuple):
    """Descriptors that a process starts with; `terminal`: its input is one."""

    input: int
    output: int
    error: int
    terminal: bool = False


@functools.cache
def nothing() -> int:
    """/dev/null, for the input of the operator's members. Tenants do not share an open file."""
    return os.open(os.devnull, os.O_RDONLY)


class Launcher:
    """One process, started with the first member that needs it, and again if it ends. It is used
    where join.c cannot run."""

    def __init__(self, node_mark: str) -> None:
        self._node_mark = node_mark
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def pids(self) -> set[int]:
        return {self._process.pid} if self._process is not None else set()

    def ended(self, pid: int, code: int) -> bool:
        if self._process is None or self._process.pid != pid:
            return False
        self._process.returncode = code
        self.close()
        return True

    def close(self) -> None:
        if self._control is not None:
            self._control.close()  # it ends when it reads that
        self._process = self._control = None

    def warm_up(self) -> None:
        """Have it ready before a member waits for it."""
        if self._process is None:
            self._begin()

    def start(self, order: Order, ends: Ends) -> int:
        """The id of the process, which has become the program. CannotStart says why it has not."""
        for last in (False, True):
            try:
                return self._start(order, ends)
            except (OSError, msgspec.DecodeError) as error:
                log.warning("the launcher is started again: %s", error)
                self.close()
                if last:
                    raise CannotStart(f"cannot confine it: {error}", Fault.START) from error
        raise AssertionError

    def _start(self, order: Order, ends: Ends) -> int:
        self.warm_up()
        assert self._control is not None
        content = os.memfd_create("order", os.MFD_CLOEXEC)
        waits, waiting = os.pipe()
        errors, tell = os.pipe()
        handles = {content, waits, waiting, errors, tell}
        try:
            with open(content, "wb", closefd=False) as file:
                file.write(msgspec.json.encode(order))
            self._control.settimeout(START_S_MAX)
            given = [content, ends.input, ends.output, ends.error, waits, tell]
            socket.send_fds(self._control, [b"start"], given)
            answer = msgspec.json.decode(self._control.recv(ANSWER_BYTES_MAX), type=Answer)
            if not answer.pid:
                raise OSError(answer.why or "no answer")
            os.close(tell)  # the process has its own, and closes it when it becomes the program
            handles.discard(tell)
            # Raises if it is not our child; does not reap it if it has ended.
            os.waitid(os.P_PID, answer.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            why = _until_started(errors)
        finally:
            for handle in handles:
                os.close(handle)
        if why:
            with contextlib.suppress(ProcessLookupError):
                os.kill(answer.pid, signal.SIGKILL)
            raise CannotStart(f"cannot start {order.argv[0]}: {why}")
        return answer.pid

    def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(os.getpid()), str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.agent.confine.enter", *words],
                cwd="/",
                env={**os.environ, NODE_MARK: self._node_mark},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        finally:
            theirs.close()
        self._control = ours


def _until_started(errors: int) -> str:
    """The pipe is closed when the process becomes the program."""
    deadline = time.monotonic() + START_S_MAX
    said = b""
    while len(said) < WHY_BYTES_MAX:
        ready, _, _ = select.select([errors], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return f"it was not started in {START_S_MAX:.0f} s"
        data = os.read(errors, WHY_BYTES_MAX)
        if not data:
            break
        said += data
    return said.decode(errors="replace")


# Which mounts a member of a tenant gets: pure.
#
# Permissions keep a tenant's user out of everything that is not its own. The mounts let it reach
# what is: its folders are inside the cluster's home, which no other user may enter. So the first
# folder on the way that the user may not enter is covered by an empty one, which holds only what it
# may see.


PRIVATE = ("/tmp", "/var/tmp", "/dev/shm")  # each tenant or member sees its own


class Shown(NamedTuple):
    """A folder that the member needs. `barrier`: the first folder on the way that its user may not
    enter; empty if there is none. Both are real paths, without links."""

    path: str
    source: str
    barrier: str = ""
    writable: bool = False


class Covered(msgspec.Struct, frozen=True, array_like=True):
    """An empty folder in memory over another; sealed when it holds what it should."""

    path: str


class Bound(msgspec.Struct, frozen=True, array_like=True):
    """`source`, opened before anything is covered, appears at `path`."""

    source: str
    path: str
    writable: bool = True
    file: bool = False


class Mounts(msgspec.Struct, frozen=True):
    """In order: `private`, `covered`, `bound`, and `read_only`, which are volumes."""

    private: tuple[Bound, ...] = ()
    covered: tuple[Covered, ...] = ()
    bound: tuple[Bound, ...] = ()
    read_only: tuple[str, ...] = ()


class Order(msgspec.Struct, frozen=True):
    """What the launcher needs to start one process."""

    program: str
    argv: tuple[str, ...]
    env: dict[str, str]
    workdir: str
    uid: int
    files: int
    mounts: Mounts
    entrances: tuple[str, ...] = ()  # of its cgroup
    terminal: bool = False  # its input is a terminal, which becomes its own


def steps(order: Order, agent: int) -> list[str]:
    """The same for join.c, which does them one by one: j joins a group, s separates its mounts, o
    opens what is to be shown while it is still there, p puts it over a place such as /tmp, c covers
    a folder, w and r show a folder in it, f a file, v holds a volume, k closes the cover, u becomes
    the user."""
    found = [word for entrance in order.entrances for word in ("j", entrance)]
    private, covered, bound = order.mounts.private, order.mounts.covered, order.mounts.bound
    if private or covered or bound or order.mounts.read_only:
        found.append("s")
        sources = dict.fromkeys(one.source for one in (*private, *bound))
        number = {source: str(place) for place, source in enumerate(sources)}
        found += [word for source in sources for word in ("o", source)]
        found += [word for one in private for word in ("p", number[one.source], one.path)]
        found += [word for one in covered for word in ("c", one.path)]
        for one in bound:
            kind = "f" if one.file else "w" if one.writable else "r"
            found += [kind, number[one.source], one.path]
        found += [word for volume in order.mounts.read_only for word in ("v", volume)]
        found += [word for one in covered for word in ("k", one.path)]
    terminal = "terminal" if order.terminal else ""
    found += ["u", str(order.uid), str(order.files), str(agent), terminal, order.workdir]
    return ["+", *found, "--", order.program, *order.argv]


def spawn(join: str, order: Order, ends: Ends) -> int:
    """The id of the process, which becomes the program or says in its error output why not."""
    streams = [(os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(ends[:3])]
    words = [join, *steps(order, os.getpid())]
    return os.posix_spawn(join, words, order.env, file_actions=streams)


def mounts(
    shown: Iterable[Shown],
    private: Mapping[str, str],
    inaccessible: Mapping[str, str],
    read_only: tuple[str, ...] = (),
    covers: Iterable[str] = (),
) -> Mounts:
    """`private`: places and the folders that take their place. `inaccessible`: files, such as
    devices, and what takes their place. `covers`: folders that are in those of the private places
    to be covered, with what is shown inside."""
    bound: list[Bound] = []
    covered: list[str] = []
    for one in sorted(set(shown)):
        inside = any(within(one.path, place) for place in private)
        if not (one.barrier or inside):
            continue  # it is in its place already
        if any(within(one.path, other.path) for other in bound):
            continue  # it came with a folder around it
        bound.append(Bound(one.source, one.path, one.writable))
        wall = one.barrier
        if inside:
            wall = next((top for top in covers if within(one.path, top) and one.path != top), "")
        if wall and not any(within(wall, other) for other in covered):
            covered = [other for other in covered if not within(other, wall)]
            covered.append(wall)
    bound += [Bound(source, path, file=True) for path, source in sorted(inaccessible.items())]
    return Mounts(
        tuple(Bound(source, place) for place, source in sorted(private.items())),
        tuple(map(Covered, sorted(covered))),
        tuple(bound),
        read_only,
    )


def within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")
