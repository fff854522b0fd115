"""An SSH server for one connection of one user, whose processes run beside the member's own.

The client's token has let it in; the keys only join this server to that client's request. What the
connection may do is what `shoal exec` and `shoal forward` may do.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import shlex
import socket
import sys
from collections.abc import Coroutine
from typing import Any

from shoal.agent.faults import CannotStart
from shoal.agent.processes import Processes
from shoal.agent.sessions import beside
from shoal.agent.sessions.beside import SIGNALS, converse
from shoal.agent.sessions.visit import Ports, Unheard, Visit
from shoal.sessions.streams import PIECE_BYTES, Began, Ended, splice

log = logging.getLogger("shoal.agent")

MISSING = "this node cannot serve ssh: install asyncssh there, with: pip install 'shoal[ssh]'"
HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "")
SFTP = "sftp"
SFTP_SERVERS = (
    "/usr/lib/openssh/sftp-server",
    "/usr/libexec/openssh/sftp-server",
    "/usr/lib/ssh/sftp-server",
    "/usr/libexec/sftp-server",
)
CHANNELS_MAX = 64  # processes and connections of one user at once
LOGIN_S_MAX = 30
PASSED_ON = ("LANG", "LC_", "COLORTERM", "TERM_PROGRAM")  # of the user's variables


async def serve(visit: Visit, processes: Processes, ports: Ports) -> Ended:
    try:
        asyncssh = await asyncio.to_thread(importlib.import_module, "asyncssh")
    except ImportError:
        return Ended(code=127, why=MISSING)
    request = visit.order.request
    try:
        host_key = asyncssh.import_private_key(request.host_key)
        allowed = asyncssh.import_authorized_keys(request.public_key)
    except (ValueError, asyncssh.KeyImportError):
        return Ended(code=2, why="the keys of the ssh session cannot be read")
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    visit.streams.say(Began())
    moving = asyncio.create_task(splice(visit.fixed[0], reader, writer))
    door = _Door(asyncssh, visit, processes, ports)
    connection: Any = None
    try:
        connection = await asyncssh.run_server(
            theirs,
            config=None,
            server_factory=lambda: door.server,
            server_host_keys=[host_key],
            authorized_client_keys=allowed,
            encoding=None,
            line_editor=False,
            agent_forwarding=False,
            password_auth=False,
            kbdint_auth=False,
            gss_host=None,
            login_timeout=LOGIN_S_MAX,
        )
        await connection.wait_closed()
        await moving
    except (OSError, asyncssh.Error) as error:
        log.info("an ssh session with %s ended: %s", visit.name, error)
    finally:
        await door.close()
        if connection is not None:
            connection.abort()
        moving.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await moving
    return Ended()


class _Door:
    """What a connection may ask for."""

    def __init__(self, asyncssh: Any, visit: Visit, processes: Processes, ports: Ports) -> None:
        self._asyncssh = asyncssh
        self._visit, self._processes, self._ports = visit, processes, ports
        self._tasks: set[asyncio.Task[Any]] = set()
        self.server = self._server()

    def _server(self) -> Any:
        def requested(_: Any, host: str, port: int, *_from: Any) -> Any:
            return self.connect(host, port)

        own = {"connection_requested": requested, "session_requested": lambda _: self._process()}
        return type("Server", (self._asyncssh.SSHServer,), own)()

    def _process(self) -> Any:
        """asyncssh would serve sftp itself, which is for the job's user to do."""
        asyncssh = self._asyncssh

        def started(process: Any) -> None:
            channel = process.channel
            writers = asyncssh.SSHWriter, asyncssh.constants.EXTENDED_DATA_STDERR
            process._stdin = asyncssh.SSHReader(process, channel)
            process._stdout = writers[0](process, channel)
            process._stderr = writers[0](process, channel, writers[1])
            self._begin(self.process(process))

        own = {"subsystem_requested": lambda *_: True, "session_started": started}
        made = type("Process", (asyncssh.SSHServerProcess,), own)
        return made(self.process, None, 3, False)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a part of an ssh session failed", exc_info=error)

    def connect(self, host: str, port: int) -> Any:
        refused = self._asyncssh.ChannelOpenError
        why = self._asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED
        if host not in HERE:
            raise refused(why, f"only ports of the job are reached, at localhost, not {host[:64]}")
        if len(self._tasks) >= CHANNELS_MAX:
            raise refused(why, f"more than {CHANNELS_MAX} at once")
        try:
            found = self._ports.find(port)
        except Unheard as error:
            raise refused(self._asyncssh.OPEN_CONNECT_FAILED, str(error)) from None

        async def joined(reader: Any, writer: Any) -> None:
            try:
                near = await asyncio.open_connection(found.address, found.port)
            except OSError:
                writer.channel.abort()
                return
            await _copy((reader, writer), near)

        return lambda reader, writer: self._begin(joined(reader, writer))

    async def process(self, process: Any) -> None:
        if len(self._tasks) > CHANNELS_MAX:
            process.exit(255)
            return
        code = 255
        try:
            code = await self._run(process)
        except (CannotStart, OSError) as error:
            with contextlib.suppress(OSError, self._asyncssh.Error):
                process.stderr.write(f"shoal: {error}\n".encode())
            code = 127 if isinstance(error, CannotStart) else 255
        finally:
            process.exit(code)

    async def _run(self, process: Any) -> int:
        kind = process.term_type or ""
        columns, rows, *_ = process.term_size
        env = {
            name: value
            for name, value in process.env.items()
            if name.startswith(PASSED_ON) and isinstance(value, str)
        }
        made = beside.start(
            self._processes,
            self._visit.order.ref,
            self._command(process),
            terminal=kind,
            rows=rows,
            columns=columns,
            extra=env,
        )
        given = _Given(self._asyncssh, process, made, self._processes)
        output, error = _Taken(process.stdout), _Taken(process.stderr)
        return await converse(self._processes, made, given, output, error, stay=True)

    def _command(self, process: Any) -> tuple[str, ...]:
        asked = process.subsystem
        if asked == SFTP:
            contained = self._processes.containers.name(self._visit.order.ref) is not None
            python = [] if contained else [sys.executable, "-m", "shoal.agent.sessions.sftp"]
            return "/bin/sh", "-c", sftp_script(python)
        if asked:
            raise CannotStart(f"there is no subsystem {asked[:64]!r}; use sftp, or a command")
        if process.command is None:
            return ()
        run = 'command -v bash >/dev/null && exec bash -c "$1"; exec sh -c "$1"'
        return "/bin/sh", "-c", run, "sh", process.command

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def sftp_script(python: list[str]) -> str:
    """The system's server, as the member finds it; otherwise the one that comes with asyncssh."""
    tries = "".join(f"[ -x {path} ] && exec {path}; " for path in SFTP_SERVERS)
    last = f"exec {shlex.join(python)}" if python else "echo no sftp-server here >&2; exit 127"
    return tries + last


class _Given:
    """The client's input, as a stream is read. Other things that it says come the same way."""

    def __init__(self, asyncssh: Any, process: Any, made: beside.Beside, all_: Processes) -> None:
        self._asyncssh, self._process, self._made, self._all = asyncssh, process, made, all_

    async def read(self) -> bytes:
        while True:
            try:
                data: bytes = await self._process.stdin.read(PIECE_BYTES)
                return data
            except self._asyncssh.TerminalSizeChanged as size:
                self._made.resize(size.height, size.width)
            except self._asyncssh.SignalReceived as asked:
                number = next((one for one in SIGNALS if one.name == f"SIG{asked.signal}"), None)
                if number is not None:
                    beside.send(self._all, self._made, number)
            except self._asyncssh.BreakReceived:
                pass
            except self._asyncssh.Error as error:
                raise ConnectionResetError(str(error)) from None


class _Taken:
    """Where output goes, as a stream is written."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def end(self) -> None:
        """The exit code says so."""


async def _copy(far: tuple[Any, Any], near: tuple[Any, Any]) -> None:
    """Between a channel and a socket, with half-closes."""

    async def one(reader: Any, writer: Any) -> None:
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    try:
        await asyncio.gather(one(far[0], near[1]), one(near[0], far[1]))
    except OSError:
        far[1].channel.abort()
    finally:
        near[1].close()
        far[1].close()
