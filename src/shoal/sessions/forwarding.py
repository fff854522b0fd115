"""Forwards connections to a port of this machine to a port on which a member listens."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Self

from shoal.client import Client, ShoalError
from shoal.model.session import Kind
from shoal.sessions.session import Session
from shoal.sessions.streams import Port, splice

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
