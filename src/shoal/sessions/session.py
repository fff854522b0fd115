"""The client's end of a session: it meets a member's node at the head, forwards ports and sends
files.

While the head restarts, both ends come back to the meeting and go on where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tarfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast

import msgspec

from shoal.client import Client, ShoalError
from shoal.link.meeting import DONE, Host, ws_error
from shoal.model.session import Kind, SessionRequest, SessionView
from shoal.sessions.streams import (
    PIECE_BYTES,
    Began,
    Broken,
    Ended,
    Port,
    Stream,
    Streams,
    Word,
    splice,
)

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection


ENTER_S_MAX = 30.0  # for the node to enter the meeting
ASK_AGAIN_S = 5.0  # a message to a node may be lost
WAKE_S_MAX = 600.0  # for a job that is asleep: its GPUs may be in use
WAKE_LOOK_S = 5.0
LOST_S_MAX = 120.0  # without the node; then the session is over
CLOSE_S_MAX = 2.0
LATER = 4000  # the code with which we close a connection that the node should open again


class NotBegun(ShoalError):
    """The node says why; `code` is 127 if what was to be started is not there."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.why)
        self.code = ended.code


class Session(Host):
    """One at a time with one member; after the member's end it may begin again with the next.
    `said` gets the node's words, in the loop's thread. `tell` gets lines about what a session that
    begins waits for."""

    def __init__(
        self,
        client: Client,
        kind: Kind,
        said: Callable[[Word], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
        **wanted: Any,
    ) -> None:
        super().__init__(client.endpoint, lambda _end, _way: None)
        self._client = client
        self._kind, self._wanted = kind, wanted
        self._said, self._tell = said, tell
        self._opened = False
        self.streams = Streams(self._hear)
        self.fixed: list[Stream] = []
        self.view: SessionView | None = None
        self.ended: Ended | None = Ended(why="it has not begun")
        self.over = threading.Event()
        self._arrived = threading.Event()
        self._present: ClientConnection | None = None
        self._losing: asyncio.TimerHandle | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._thread.loop

    def begin(self, job: str, member: int = 0) -> None:
        """Returns when the node has said that it is under way. ShoalError says why it is not."""
        if not self._opened:
            try:
                invitation = self.open()
            except OSError as error:
                self._refused(job, member)
                raise ShoalError(f"the head opens no meeting: {error}") from None
            self._opened = True
            self._wanted |= {"meeting": invitation.meeting, "key": invitation.key}
        self.streams = Streams(self._hear)
        self.fixed = self.streams.fixed(self._kind)
        self.ended = None
        self.over.clear()
        self._arrived.clear()
        request = SessionRequest(kind=self._kind, member=member, **self._wanted)
        for _ in range(int(ENTER_S_MAX / ASK_AGAIN_S)):
            view = self.view = self._woken(job, request)
            if self._arrived.wait(ASK_AGAIN_S):
                break
        else:
            self.ended = Ended(why="the node did not answer")
            message = f"{view.node}, where {job} runs, does not answer; try again, or see: "
            raise ShoalError(f"{message}shoal nodes")
        ended = self.ended
        if ended is not None and ended.why:
            raise NotBegun(ended)

    def _woken(self, job: str, request: SessionRequest) -> SessionView:
        """A job that is asleep is woken first, however often it falls asleep again."""
        since, told = time.monotonic(), [""]
        while (view := self._client.open_session(job, request)).waking:
            if time.monotonic() - since > WAKE_S_MAX:
                message = f"{job} is still {view.waking} after {WAKE_S_MAX:.0f} s"
                raise ShoalError(f"{message}: {view.why}; see: shoal why {job}")
            text = f"{job} is {view.waking}: {view.why}"
            if len(told) == 1:
                text = f"{job} is {view.waking} ..."
                if view.waking != "waking":
                    text = f"{job} is {view.waking}; waking it ..."
            if text not in told[-2:]:
                told.append(text)
                self._tell(text)
            self._client.job(job, wait_for="running", wait_s=WAKE_LOOK_S)
        return view

    def _refused(self, job: str, member: int) -> None:
        """Without a meeting nothing begins; but the head says in words why we may not."""
        wanted = {"meeting": "0" * 32, "key": "0" * 32, **self._wanted}
        self._client.open_session(job, SessionRequest(kind=self._kind, member=member, **wanted))

    def close(self) -> None:
        """The process or the connections on the node end."""
        if not self._opened:
            self._thread.stop()
            return

        async def leave() -> None:
            self._cease("closed")
            if self._present is not None:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self._present.close(DONE), CLOSE_S_MAX)

        with contextlib.suppress(Exception):
            self._thread.call(leave()).result(2 * CLOSE_S_MAX)
        super().close()

    # -- in the loop's thread ----------------------------------------------------------------

    async def _met(self, channel: ClientConnection) -> None:
        before, self._present = self._present, channel
        if before is not None:  # the node came again; it knows better whether a connection is good
            before.transport.abort()
            await before.wait_closed()
        if self._losing is not None:
            self._losing.cancel()
        try:
            await self.streams.reliable.carry(channel)
        except (Broken, msgspec.DecodeError) as error:
            self._cease(f"the session broke off: {error}")
        except (OSError, TimeoutError, ws_error()):
            pass  # the node comes again
        finally:
            if self._present is channel:
                self._present = None
                self._losing = self.loop.call_later(
                    LOST_S_MAX, self._cease, "the connection to the node was lost"
                )
            code = DONE if self.ended is not None else LATER
            with contextlib.suppress(Exception):
                await channel.close(code)

    def _hear(self, word: Word) -> None:
        if isinstance(word, Ended):
            self.ended = self.ended or word
            self._said(word)
            self._cease(word.why or "it has ended")
            if self._present is not None:
                self._thread.spawn(self._present.close(DONE))
            return
        self._said(word)
        if isinstance(word, Began):
            self._arrived.set()

    def _cease(self, why: str) -> None:
        """It is over; nothing more comes or goes."""
        if self.ended is None:
            self.ended = Ended(code=255, why=why)
        self.streams.lost(why)
        self._arrived.set()
        self.over.set()


# Forwards connections to a port of this machine to a port on which a member listens.


LOCAL = "127.0.0.1"
BACKLOG = 128


class Forward:
    """Listens on 127.0.0.1 until it is closed. Its connections reach the member that runs when they
    are made: after a restart of the job or of the head, new ones work again. `target`: called for
    the job and its member each time a session begins. `problem` gets a line for each connection
    that could not be made, and one if the job has to be woken first."""

    def __init__(
        self,
        client: Client,
        target: Callable[[], tuple[str, int]],
        ports: list[tuple[int, int]],
        problem: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`ports`: pairs of a local port (0: any that is free) and the member's (0: its $PORT)."""
        self._target, self._problem = target, problem
        self._listeners: list[socket.socket] = []
        self._session: Session | None = None
        self._servers: list[asyncio.Server] = []
        try:
            self._listeners = [_listener(local) for local, _ in ports]
            self.ports: list[int] = [one.getsockname()[1] for one in self._listeners]
            self._session = Session(client, Kind.FORWARD, tell=problem)
            self._session.begin(*target())
            self._turn = asyncio.Lock()
            begun = asyncio.run_coroutine_threadsafe(self._serve(ports), self._session.loop)
            begun.result()
        except BaseException:
            self.close()
            raise

    @property
    def port(self) -> int:
        """The first local port."""
        return self.ports[0]

    @property
    def url(self) -> str:
        return f"http://{LOCAL}:{self.port}"

    @property
    def node(self) -> str:
        view = self._session.view if self._session is not None else None
        return view.node if view is not None else ""

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            for server in self._servers:
                session.loop.call_soon_threadsafe(server.close)
            session.close()
        for listener in self._listeners:
            listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the session's thread -------------------------------------------------------------

    async def _serve(self, ports: list[tuple[int, int]]) -> None:
        for listener, (_, remote) in zip(self._listeners, ports, strict=True):
            self._servers.append(
                await asyncio.start_server(self._accept(remote), sock=listener, backlog=BACKLOG)
            )

    def _accept(
        self, remote: int
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                stream = (await self._ready()).streams.open(Port(remote))
            except (ShoalError, ConnectionError) as error:
                self._problem(str(error))
                writer.transport.abort()
                return
            await splice(stream, reader, writer)
            if stream.refused:
                self._problem(stream.refused)

        return accept

    async def _ready(self) -> Session:
        """A session with the member that runs now."""
        async with self._turn:
            session = self._session
            if session is None:
                raise ConnectionError("closed")
            if session.ended is not None:
                begin = session.begin
                await asyncio.to_thread(lambda: begin(*self._target()))
            return session


def forward(
    client: Client, job: str, port: int = 0, *, local_port: int = 0, member: int = 0
) -> Forward:
    """Forwards `local_port` (0: any that is free) of this machine to `port` (0: the member's $PORT)
    of a job's member:

        with shoal.sessions.forward(client, "j7", 8888) as forwarded:
            print(forwarded.url)
    """
    return Forward(client, lambda: (job, member), [(local_port, port)])


def _listener(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((LOCAL, port))
        made.listen(BACKLOG)
        made.setblocking(False)
    except (OSError, OverflowError) as error:
        made.close()
        why = getattr(error, "strerror", "") or str(error)
        message = f"cannot listen on port {port} of this machine: {why}; use 0 for a free one"
        raise ShoalError(message, "port") from None
    return made


# Files from here into a running job: a process beside its member receives and renames them.


SAID_BYTES_MAX = 4096
LOST_CODE = 255

# $1: where to, $2: the file's name, $3: its size. It has its name only when it is whole.
_FILE = """
set -e
to=$1
case $to in */) mkdir -p -- "$to" ;; esac
if [ -d "$to" ]; then to="${to%/}/$2"; fi
folder=$(dirname -- "$to")
mkdir -p -- "$folder"
part="$folder/.shoal-cp.$$"
trap 'rm -f -- "$part"' EXIT
cat > "$part"
[ "$(wc -c < "$part")" -eq "$3" ] || { echo "only a part arrived" >&2; exit 1; }
mv -f -- "$part" "$to"
"""
_FOLDER = 'set -e; mkdir -p -- "$1"; tar -x -o -f - -C "$1"'

Progress = Callable[[int], None]
Tell = Callable[[str], None]  # a line about a job that has to be woken first


def send_file(
    client: Client, target: tuple[str, int], source: Path, to: str, progress: Progress, tell: Tell
) -> None:
    """`to` is relative to the member's working directory. ShoalError says why it did not work."""
    size = source.stat().st_size
    words = ("sh", "-c", _FILE, "sh", to or ".", source.name, str(size))
    with source.open("rb") as file:
        _send(client, target, words, lambda pipe: _pump(file, pipe, size), progress, tell)


def send_folder(
    client: Client, target: tuple[str, int], source: Path, to: str, progress: Progress, tell: Tell
) -> None:
    """The folder's content goes into the folder `to`, which is made if it is not there."""

    def pack(pipe: _Pipe) -> None:
        file = cast(IO[bytes], pipe)
        with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            try:
                archive.add(source, ".")
            except OSError as error:  # unreadable, or shorter than a moment before
                name = f"{error.filename}: {error.strerror}" if error.filename else str(error)
                raise ShoalError(f"{source} could not be read to its end: {name}") from None

    words = ("sh", "-c", _FOLDER, "sh", to or ".")
    _send(client, target, words, pack, progress, tell)


class _Pipe:
    """The other process's input, as a file to write to."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self._session = session
        self._stream: Stream = session.fixed[0]
        self._progress = progress
        self._sent = 0

    def write(self, data: bytes) -> int:
        for start in range(0, len(data), PIECE_BYTES):
            _ask(self._session, self._stream.write(bytes(data[start : start + PIECE_BYTES])))
        self._sent += len(data)
        self._progress(self._sent)
        return len(data)


def _pump(file: IO[bytes], pipe: _Pipe, size: int) -> None:
    """No more than was announced: the file may grow meanwhile."""
    left = size
    while left and (data := file.read(min(left, 16 * PIECE_BYTES))):
        pipe.write(data)
        left -= len(data)


def _send(
    client: Client,
    target: tuple[str, int],
    words: tuple[str, ...],
    work: Callable[[Any], None],
    progress: Progress,
    tell: Tell,
) -> None:
    session = Session(client, Kind.EXEC, tell=tell, command=words)
    said = bytearray()
    try:
        session.begin(*target)
        readers = [
            threading.Thread(target=_listen, args=(session, stream, said), daemon=True)
            for stream in session.fixed
        ]
        for reader in readers:
            reader.start()
        with contextlib.suppress(ConnectionError, RuntimeError):  # it has ended: its words say why
            work(_Pipe(session, progress))
        with contextlib.suppress(RuntimeError):
            session.loop.call_soon_threadsafe(session.fixed[0].end)
        for reader in readers:
            reader.join()
        session.over.wait()
        ended = session.ended or Ended(code=LOST_CODE, why="the connection was lost")
    finally:
        session.close()
    if ended.code or ended.why:
        lines = said.decode(errors="replace").strip().splitlines()
        why = ended.why or (lines[-1] if lines else f"it ended with code {ended.code}")
        raise ShoalError(f"it could not be written in the job: {why}")


def _listen(session: Session, stream: Stream, said: bytearray) -> None:
    with contextlib.suppress(ConnectionError, RuntimeError):
        while data := _ask(session, stream.read()):
            if len(said) < SAID_BYTES_MAX:
                said += data


def _ask(session: Session, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, session.loop).result()


def total_bytes(source: Path) -> int:
    if not source.is_dir():
        return source.stat().st_size
    found = (Path(folder) / name for folder, _, names in os.walk(source) for name in names)
    return sum(path.lstat().st_size for path in found)
