"""Serves the API at the cluster's two doors: the socket file, and the port, with TLS or without."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn

from shoal.api.forwarded import SERVED
from shoal.api.limits import Gate, Guard, guarded
from shoal.api.moment import MOMENTS
from shoal.api.routing import App
from shoal.api.tls import STATE, TlsListener
from shoal.control.alarms import Alarms
from shoal.control.sockets import Doors
from shoal.machine.enduring import enduring

if TYPE_CHECKING:
    from shoal.control.certificates import Encryption

FILES_RESERVED = 256  # for agents, the store and logs; connections share the rest


class ApiServer:
    """With `encryption`, the port speaks TLS; `moved` is called when the certificate changes."""

    def __init__(
        self,
        app: App,
        doors: Doors,
        encryption: Encryption | None,
        alarms: Alarms,
        moved: Callable[[], None],
    ) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        gate = Gate((files - FILES_RESERVED) // 2)
        self._app = app
        self._plain: list[socket.socket] = [doors.local]
        self._server = _Server(
            uvicorn.Config(
                app.state[SERVED],
                log_level="warning",
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                date_header=False,
                http=guarded(gate),
                ws=asyncio.Protocol,  # any: `guarded` knows which, and loads it with the first one
                timeout_graceful_shutdown=1,
            )
        )
        self._encryption, self._alarms, self._moved = encryption, alarms, moved
        self._tasks: list[asyncio.Task[None]] = []
        self._listener: TlsListener | None = None
        if encryption is None:
            self._plain.append(doors.network)
        else:
            app.state[STATE] = lambda: encryption.served.anchor
            self._listener = TlsListener(doors.network, encryption.context, gate, self._protocol)

    async def run(self) -> None:
        """Until `end` is called."""
        if self._listener is not None and self._encryption is not None:
            self._server.config.load()  # as the server itself does when it begins
            upkeep, alarms, moved = self._encryption.run, self._alarms, self._moved
            listen = self._listener.run
            self._tasks = [
                asyncio.create_task(enduring("the TLS port", listen)),
                asyncio.create_task(enduring("the certificate", lambda: upkeep(alarms, moved))),
            ]
        try:
            await self._server.serve(sockets=self._plain)
        finally:
            self._stop_tasks()
            await self._app.state[MOMENTS].close()

    def leave(self) -> None:
        """End, but take no connection from this moment on: another server waits for them."""
        self._stop_tasks()
        for listening in self._server.servers:
            listening.close()
        self.end()

    def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def end(self) -> None:
        self._server.should_exit = True
        self._server.ending.set()
        self._app.state["feed"].end()  # open pages would keep it
        self._app.state[SERVED].close()

    def _protocol(self) -> Guard:
        config = self._server.config
        made = config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=self._server.server_state, app_state={}
        )
        assert isinstance(made, Guard)
        return made


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        """uvicorn's own looks ten times a second whether it is to end."""
        await self.ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the controller handles signals itself
