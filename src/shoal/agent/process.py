"""One process of a member, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from typing import NamedTuple

from shoal.agent.confine import limits
from shoal.agent.confine.launcher import Ends, nothing
from shoal.agent.confine.tenant import Task
from shoal.agent.warm.rules import Recipe
from shoal.machine.cgroups import Ceiling, Group, Used
from shoal.machine.paths import entering
from shoal.model.commands import Launch
from shoal.model.job import MemberRef

# By then most scripts have imported what they need; slower ones are looked at again, ever later.
FIRST_LOOK_S = 3.0


class Ended(NamedTuple):
    """A member that has ended: its exit code as a shell reports it, and what it was refused."""

    ref: MemberRef
    code: int
    ceiling: Ceiling
    used: Used
    started: bool = True  # False: its container did not run its command
    alone: bool = False  # none of its processes was left, so nobody has a file of it open


class Place(NamedTuple):
    """What a process beside the member's own needs to be in the same surroundings."""

    env: dict[str, str]
    workdir: str
    task: Task | None = None  # of a tenant that is kept apart
    contained: bool = False
    words: tuple[str, ...] = ()  # what comes before the command: for volumes, or apptainer's


class Process:
    """A member as a process; `recipe`: how to start it warm the next time."""

    __slots__ = (
        "ceiling",
        "console",
        "group",
        "look_at",
        "look_s",
        "modules",
        "pid",
        "place",
        "recipe",
        "ref",
        "seen",
        "uid",
    )

    def __init__(
        self,
        ref: MemberRef,
        pid: int,
        found: Recipe | None,
        ceiling: Ceiling,
        group: Group | None,
        uid: int = 0,
        place: Place | None = None,
    ) -> None:
        self.ref = ref
        self.pid = pid
        self.recipe = found
        self.ceiling = ceiling
        self.group = group
        self.place = place
        self.console: Console | None = None  # of an interactive member
        self.uid = uid  # of a tenant that is kept apart
        self.modules: tuple[str, ...] = ()  # what to preload for it, once known
        self.seen: tuple[str, ...] = ()
        self.look_s = FIRST_LOOK_S
        self.look_at = time.monotonic() + FIRST_LOOK_S


def started(
    words: list[str], workdir: str, env: dict[str, str], output: int, more: Sequence[int] = ()
) -> int:
    """The id of a process that leads a session of its own. `joining` has begun its words."""
    if words[0] == limits.JOIN and not more:
        return _spawned(words, workdir, env, output)
    workdir, words = entering(workdir, words)
    popen = subprocess.Popen(
        words,
        cwd=workdir,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=more,
        start_new_session=True,
    )
    popen.returncode = 0  # who started it reaps it, too, and not Popen
    return popen.pid


def _spawned(words: list[str], workdir: str, env: dict[str, str], output: int) -> int:
    """In half the time that Popen takes: the rest is done by join.c, also that the process gets no
    file but these."""
    ends = nothing(), output, output
    streams = [(os.POSIX_SPAWN_DUP2, handle, number) for number, handle in enumerate(ends)]
    words = [words[0], f"={workdir}", *words[1:]]
    return os.posix_spawn(words[0], words, env, file_actions=streams)


# The terminal of an interactive member: the agent reads it, keeps its output as every member's is
# kept, and shows it to whoever is attached.


KIND = "xterm-256color"
RECENT_BYTES = 256 * 1024  # of output, for those who attach, or are slow
READ_BYTES = 64 * 1024
LAST_READS_MAX = 1024  # of what it wrote before its end
SIZE = struct.Struct("HHHH")
ROWS, COLUMNS = 24, 80
# The leader of a session that opens a terminal gets it as its own.
TAKE_TERMINAL = 'tty=$1; shift; exec 0<>"$tty" 1>&0 2>&0; unset tty; exec "$@"'


def taking(slave: int, env: dict[str, str]) -> list[str]:
    """What comes before the words of a process that leads its session and gets the terminal."""
    unset = " ".join(name for name in limits.OF_THE_SHELL if name not in env)
    take = f"unset {unset}; {TAKE_TERMINAL}" if unset else TAKE_TERMINAL
    return ["/bin/sh", "-c", take, "sh", os.ttyname(slave)]


def resize(master: int, rows: int, columns: int) -> None:
    if rows > 0 and columns > 0:
        with contextlib.suppress(OSError):
            fcntl.ioctl(master, termios.TIOCSWINSZ, SIZE.pack(rows, columns, 0, 0))


class Console:
    """`output` is an open file. `code` gets the member's exit code when all was read."""

    def __init__(self, output: int) -> None:
        self.master, self._slave = pty.openpty()
        self._output = os.dup(output)
        self._recent = bytearray()
        self._before = 0  # bytes that came before those in `_recent`
        self._news = asyncio.Event()
        self.code: int | None = None
        os.set_blocking(self.master, False)
        resize(self.master, ROWS, COLUMNS)

    @property
    def ends(self) -> Ends:
        """The member's: for its start."""
        return Ends(self._slave, self._slave, self._slave, terminal=True)

    def own(self, uid: int) -> None:
        os.fchown(self._slave, uid, -1)

    def taking(self, env: dict[str, str]) -> list[str]:
        return taking(self._slave, env)

    def begin(self) -> None:
        """The member has started. It opens the terminal by name, so the agent's own end stays open
        until it ends: while nobody has that end, reading fails for good."""
        asyncio.get_running_loop().add_reader(self.master, self._read)

    def discard(self) -> None:
        """It could not start."""
        os.close(self._slave)
        os.close(self.master)
        os.close(self._output)

    def end(self, code: int) -> None:
        """The member has ended, but what it wrote may not be read yet."""
        loop = asyncio.get_running_loop()
        os.close(self._slave)
        for _ in range(LAST_READS_MAX):
            if not self._read():
                break
        loop.remove_reader(self.master)
        os.close(self.master)
        os.close(self._output)
        self.code = code
        self._news.set()

    def _read(self) -> bool:
        try:
            data = os.read(self.master, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # nobody has the other end any more
            asyncio.get_running_loop().remove_reader(self.master)
            return False
        with contextlib.suppress(OSError):  # a full disk
            os.write(self._output, data)
        self._recent += data
        over = len(self._recent) - RECENT_BYTES
        if over > 0:
            del self._recent[:over]
            self._before += over
        self._news.set()
        return bool(data)

    async def after(self, place: int) -> tuple[int, bytes]:
        """Output from this place on, and where it ends; nothing if the member has ended. Of what
        is no longer kept, a line tells the number of bytes."""
        while self._before + len(self._recent) <= place:
            if self.code is not None:
                return place, b""
            self._news.clear()
            await self._news.wait()
        missed = self._before - place
        data = bytes(self._recent[max(0, -missed) :])
        if missed > 0 and place > 0:
            data = b"\r\n[shoal: %d bytes left out]\r\n" % missed + data
        return self._before + len(self._recent), data


def console_of(launch: Launch, output: int, env: dict[str, str], uid: int) -> Console | None:
    """For an interactive member, whose environment then names the kind of its terminal."""
    if not launch.interactive:
        return None
    env.setdefault("TERM", KIND)
    made = Console(output)
    if uid:
        made.own(uid)
    return made
