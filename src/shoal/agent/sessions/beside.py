"""Processes beside a member's own, in the same surroundings, and the session with each of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import secrets
import signal
import subprocess
from collections.abc import Mapping
from typing import Any, Protocol, cast

from shoal.agent.confine.launcher import Ends
from shoal.agent.confine.limits import joining
from shoal.agent.faults import CannotStart
from shoal.agent.images.containers import inside
from shoal.agent.ownership import read_process
from shoal.agent.process import COLUMNS, ROWS, Console, Place, Process, resize, taking
from shoal.agent.processes import Processes, find_program
from shoal.agent.sessions.visit import Visit
from shoal.machine.kernel import variable
from shoal.machine.paths import ask, entering
from shoal.model.job import MemberRef
from shoal.sessions.streams import PIECE_BYTES, Began, Ended, Resize, Signal, Stream, Word

SESSION = "SHOAL_SESSION"  # in the environment of what a user starts beside a member
# The best shell there is, also in an image.
SHELL = (
    "/bin/sh",
    "-c",
    'command -v "${SHELL:-}" >/dev/null && [ "$SHELL" != /bin/sh ] && exec "$SHELL"; '
    "command -v bash >/dev/null && exec bash; exec sh",
)
HANG_UP_S_MAX = 2.0  # between SIGHUP and SIGKILL


class Beside:
    """One such process. `master` is the agent's end of its terminal; without a terminal it has
    three pipes. `code` gets its exit code."""

    def __init__(self, ref: MemberRef, terminal: bool) -> None:
        self.ref = ref
        self.name = secrets.token_hex(8)
        self.pid = 0
        self.master: int | None = None
        self.input = self.output = self.error = -1  # the agent's ends
        self._theirs: list[int] = []
        if terminal:
            self.master, slave = pty.openpty()
            self._theirs = [slave]
            self.ends = Ends(slave, slave, slave, terminal=True)
            self.input, self.output = os.dup(self.master), os.dup(self.master)
        else:
            given, self.input = os.pipe()
            self.output, output = os.pipe()
            self.error, error = os.pipe()
            self._theirs = [given, output, error]
            self.ends = Ends(given, output, error)
        self.code: asyncio.Future[int] | None = None

    def resize(self, rows: int, columns: int) -> None:
        if self.master is not None:
            resize(self.master, rows, columns)

    def started(self) -> None:
        """Or not: their ends are theirs alone."""
        for handle in self._theirs:
            os.close(handle)
        self._theirs = []

    def close(self) -> None:
        """The agent's ends. A terminal hangs up."""
        self.started()
        for handle in (self.input, self.output, self.error, self.master):
            if handle is not None and handle >= 0:
                os.close(handle)
        self.input = self.output = self.error = -1
        self.master = None


def start(
    processes: Processes,
    ref: MemberRef,
    command: tuple[str, ...],
    *,
    terminal: str = "",
    rows: int = 0,
    columns: int = 0,
    extra: Mapping[str, str] | None = None,
) -> Beside:
    """CannotStart says why not."""
    process = processes.get(ref)
    if process is None or process.place is None:
        raise CannotStart(f"{ref.job}.{ref.member} is no longer running on this node")
    made = Beside(ref, bool(terminal))
    try:
        made.resize(rows or ROWS, columns or COLUMNS)
        more = {**(extra or {}), SESSION: made.name, **({"TERM": terminal} if terminal else {})}
        argv = command or SHELL
        if process.place.contained:
            made.pid = _in_container(processes, process, process.place, argv, more, made)
        else:
            made.pid = _beside(processes, process, process.place, argv, more, made)
        made.code = processes.entered.add(made.pid, ref)
    except OSError as error:
        made.close()
        raise CannotStart(f"cannot start {command[0] if command else 'a shell'}: {error}") from None
    except BaseException:
        made.close()
        raise
    made.started()
    return made


def _beside(
    processes: Processes,
    process: Process,
    place: Place,
    argv: tuple[str, ...],
    more: Mapping[str, str],
    made: Beside,
) -> int:
    env = {**place.env, **more}
    path = env.get("PATH", os.defpath)
    paths = (place.workdir, argv[0], *path.split(":"))
    program = ask(paths, find_program, argv[0], place.workdir, path)
    if place.task is not None:
        if made.ends.terminal:
            os.fchown(made.ends.input, place.task.uid, -1)
        task = place.task._replace(argv=argv, program=program, env=env)
        return processes.apart.start(task, made.ends, process.group)
    words = [*joining(process.group, env, place.words), program, *argv[1:]]
    return _popen(words, place.workdir, env, made)


def _in_container(
    processes: Processes,
    process: Process,
    place: Place,
    argv: tuple[str, ...],
    more: Mapping[str, str],
    made: Beside,
) -> int:
    name = processes.containers.name(process.ref)
    if name is None:  # apptainer: its containers are only processes, so one more is the same
        given = {f"APPTAINERENV_{key}": value for key, value in more.items()}
        env = {**place.env, **given}
        words = [*joining(process.group, env), *place.words, *argv]
        return _popen(words, place.workdir, env, made)
    if processes.containers.first(process.ref) is None:
        raise CannotStart("its container is only starting; try again in a moment")
    command = processes.containers.command(process.ref)
    words = [
        *joining(None, {}),
        *command,
        "--log-level=error",  # its own warnings would be among what the command writes
        "exec",
        "--interactive",
        *(["--tty"] if made.ends.terminal else []),
        *(f"--env={key}={value}" for key, value in more.items()),
        name,
        *argv,
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")}
    return _popen(words, place.workdir, env, made)


def _popen(words: list[str], workdir: str, env: dict[str, str], made: Beside) -> int:
    ends = made.ends
    if ends.terminal:
        words = [*taking(ends.input, env), *words]
    workdir, words = entering(workdir, words)
    started = subprocess.Popen(
        words,
        cwd=workdir,
        env=env,
        stdin=ends.input if not ends.terminal else subprocess.DEVNULL,
        stdout=ends.output,
        stderr=ends.error,
        start_new_session=True,
    )
    started.returncode = 0  # the agent reaps all its children itself
    return started.pid


async def end(processes: Processes, made: Beside) -> None:
    """Hangs up, and kills what is left of its process group."""
    made.close()
    _signal(processes, made, signal.SIGHUP)
    _signal(processes, made, signal.SIGCONT)
    if made.code is not None and not made.code.done():
        await asyncio.wait([made.code], timeout=HANG_UP_S_MAX)
    _signal(processes, made, signal.SIGKILL)


def _signal(processes: Processes, made: Beside, number: int) -> None:
    """To its process group; in a container, to the session that its command leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(made.pid, number)
    first = processes.containers.first(made.ref)
    if first is not None:
        for pid in _led(first, made.name):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def send(processes: Processes, made: Beside, number: int) -> None:
    if made.code is not None and not made.code.done():
        _signal(processes, made, number)


def _led(first: int, name: str) -> list[int]:
    """Processes in the container with the mark, in the sessions of those that came from outside:
    one that made a session of its own has chosen to stay."""
    there = inside(first)
    marked = [pid for pid in there if variable(pid, SESSION) == name]
    seen = {pid: one for pid in marked if (one := read_process(pid)) is not None}
    leaders = {one.session for one in seen.values() if one.parent not in there}
    return [pid for pid, one in seen.items() if one.session in leaders]


# A session that runs a process beside the member's own: its input, its output and its end.


# After the end of the process, for what others that it started still hold open.
DRAIN_S = 0.3
# What a client may pass on.
SIGNALS = frozenset(
    (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
)


async def run(visit: Visit, processes: Processes) -> Ended:
    request = visit.order.request
    made = start(
        processes,
        visit.order.ref,
        request.command,
        terminal=request.terminal,
        rows=request.rows,
        columns=request.columns,
    )

    def heard(word: Word) -> None:
        if isinstance(word, Resize):
            made.resize(word.rows, word.columns)
        elif isinstance(word, Signal) and word.number in SIGNALS:
            send(processes, made, word.number)

    visit.heard = heard
    visit.streams.say(Began())
    first, second = visit.fixed
    return Ended(code=await converse(processes, made, first, first, second))


class Source(Protocol):
    async def read(self) -> bytes: ...


class Sink(Protocol):
    async def write(self, data: bytes, /) -> None: ...

    def end(self) -> None: ...


async def converse(
    processes: Processes,
    made: Beside,
    given: Source,
    output: Sink,
    error: Sink,
    *,
    stay: bool = False,
) -> int:
    """Until the process has ended; returns its exit code. `stay`: what it leaves in its process
    group may stay, as with ssh elsewhere."""
    feeding = asyncio.create_task(feed(given, made))
    left = False
    try:
        await asyncio.gather(drain(made, made.output, output), drain(made, made.error, error))
        assert made.code is not None
        code = await made.code
        left = stay
        return code
    finally:
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding
        if left:
            made.close()
        else:
            await asyncio.shield(end(processes, made))


async def feed(stream: Source, made: Beside) -> None:
    """The client's input. After its end, a process without a terminal reads that."""
    loop = asyncio.get_running_loop()
    os.set_blocking(made.input, False)
    try:
        while data := await stream.read():
            while data:
                try:
                    data = data[os.write(made.input, data) :]
                except BlockingIOError:
                    await writable(loop, made.input)
    except OSError:
        pass  # it does not read any more
    if made.master is None and made.input >= 0:
        handle, made.input = made.input, -1
        os.close(handle)


async def writable(loop: asyncio.AbstractEventLoop, handle: int) -> None:
    """Until the descriptor can be written to."""
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(handle, _note, ready)
    try:
        await ready
    finally:
        loop.remove_writer(handle)


def _note(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def drain(made: Beside, handle: int, stream: Sink) -> None:
    """What the process writes, until nothing more can come."""
    if handle < 0:
        stream.end()
        return
    loop = asyncio.get_running_loop()
    os.set_blocking(handle, False)
    over = cast("asyncio.Future[int]", made.code)
    while True:
        try:
            data = os.read(handle, PIECE_BYTES)
        except BlockingIOError:
            if not await _readable(loop, handle, over):
                break
            continue
        except OSError:  # the other end of a terminal is closed
            break
        if not data:
            break
        await stream.write(data)
    stream.end()


async def _readable(
    loop: asyncio.AbstractEventLoop, handle: int, over: asyncio.Future[int]
) -> bool:
    """False: the process has ended, and nothing has come since."""
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(handle, _note, ready)
    try:
        if not over.done():
            either: list[asyncio.Future[Any]] = [ready, over]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            await asyncio.wait([ready], timeout=DRAIN_S)
        return ready.done()
    finally:
        loop.remove_reader(handle)
        ready.cancel()


# A session with the terminal of an interactive member: several users may be attached at once.


async def attach(visit: Visit, processes: Processes) -> Ended:
    process = processes.get(visit.order.ref)
    console = process.console if process is not None else None
    job = visit.order.ref.job
    if console is None:
        why = f"{job} has no terminal, because it was not submitted with --interactive"
        return Ended(code=1, why=f"{why}; for a shell beside it: shoal exec {job}")
    request = visit.order.request
    resize(console.master, request.rows, request.columns)

    def heard(word: Word) -> None:
        if isinstance(word, Resize) and console.code is None:
            resize(console.master, word.rows, word.columns)

    visit.heard = heard
    visit.streams.say(Began())
    first, second = visit.fixed
    second.end()
    feeding = asyncio.create_task(_feed(console, first))
    try:
        place = 0
        while True:
            place, data = await console.after(place)
            if not data:
                break
            await first.write(data)
        first.end()
        return Ended(code=console.code or 0)
    finally:
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding


async def _feed(console: Console, stream: Stream) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while data := await stream.read():
            while data and console.code is None:
                try:
                    data = data[os.write(console.master, data) :]
                except BlockingIOError:
                    await writable(loop, console.master)
