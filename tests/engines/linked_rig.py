"""A head that serves links alone, over TLS at a real port, and nodes whose starters are real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import uvicorn
from harness.waiting import WAIT_S, until

from shoal.api.access import Access
from shoal.api.handling import Handler
from shoal.api.http import Connection
from shoal.api.joining import NodeLink
from shoal.api.limits import Gate, Guard, guarded
from shoal.api.principal import SCOPE, Principal
from shoal.api.problems import Refusal
from shoal.api.routing import App
from shoal.api.tls import TlsListener
from shoal.control import certificates
from shoal.engines.linked.engine import LinkedEngine
from shoal.link.wire import LinkFile
from shoal.machine.files import LINK_FILE, held, write_private
from shoal.machine.kernel import AGENT_MARK, variable
from shoal.model.identity import Role
from shoal.model.node import JOINED, NodeSpec
from shoal.ports import Inbox
from tests.engines.hand import Rig

NAME = "127.0.0.1"


class Keys(Access):
    """Stands in for the access rules of the API: which keys are valid, and whose they are."""

    def __init__(self, nodes: tuple[str, ...]) -> None:
        super().__init__("operator", lambda: 0)
        self.of = {f"key-of-{node}": node for node in nodes}

    def node(self, connection: Connection) -> str | None:
        given = connection.headers.get("authorization", "").removeprefix("Bearer ")
        return self.of.get(given)

    async def guard(self, connection: Connection, _: Handler) -> None:
        node = self.node(connection)
        if node is None:
            raise Refusal(401, "no such key")
        connection.scope[SCOPE] = Principal(
            user=f"node {node}", tenant="", role=Role.VIEWER, key="k", node=node
        )


class Head(LinkedEngine):
    """The engine of one controller, with its port: it listens while the controller lives."""

    routes: tuple[type | Handler, ...] = (NodeLink,)

    def __init__(self, door: socket.socket, context: ssl.SSLContext, keys: Keys) -> None:
        super().__init__()
        self.gate = Gate()
        self._door = door.dup()
        self._context = context
        self._app = App(self.routes, keys, {"linked": lambda _: self})
        self._tasks: list[asyncio.Task[None]] = []
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, inbox: Inbox) -> None:
        await super().start(inbox)
        config = uvicorn.Config(
            self._app,
            log_level="error",
            lifespan="off",
            http=guarded(self.gate),
            ws=asyncio.Protocol,
        )
        server = uvicorn.Server(config)
        self._serving = server.server_state.tasks
        config.load()

        def protocol() -> Guard:
            made = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=server.server_state, app_state={}
            )
            assert isinstance(made, Guard)
            return made

        listener = TlsListener(self._door, self._context, self.gate, protocol)
        self._tasks = [asyncio.create_task(listener.run())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=WAIT_S)
        self._door.close()


class Proxy:
    """Passes bytes on to a port, in threads of its own, and can cut what it passes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._door = socket.create_server((NAME, 0))
        self.port = self._door.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.blocked = False  # it passes nothing on
        self.passed = 0
        self.cut_after = 0  # bytes toward the head; 0: never
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                if self.blocked:
                    near.close()
                    continue
                far = socket.create_connection((NAME, self._port))
                self._pairs.append((near, far))
                for pair in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, inward: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if inward:
                    self.passed += len(data)
                    if self.cut_after and self.passed >= self.cut_after:
                        self.cut_after = 0
                        self.cut()
                        return
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._door.close()
        self.cut()


class LinkedRig(Rig):
    nodes = ("n1", "n2")
    certain = False  # an agent that dies is started again, and shows that by its incarnation

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self.keys = Keys(self.nodes)
        self._door = socket.create_server((NAME, 0))
        self.port = self._door.getsockname()[1]
        self.proxy = Proxy(self.port)
        self.served = certificates.own(scratch / "tls", (NAME,))
        self.context = certificates.context_of(self.served)
        self._starters: dict[str, subprocess.Popen[bytes]] = {}
        for node in self.nodes:
            # The first URL is dead: the second is used, which leads through a proxy.
            self.prepare(node, f"https://{NAME}:9", f"https://{NAME}:{self.proxy.port}")
            self.start(node)

    def prepare(self, node: str, *urls: str) -> None:
        directory = self.directory(node)
        directory.mkdir(parents=True, exist_ok=True)
        spec = NodeSpec(id=node, cpu_milli=16_000, memory_mb=4_000, gpus=4, origin=JOINED)
        write_private(directory / "spec.json", msgspec.json.encode(spec))
        file = LinkFile(urls=urls, key=f"key-of-{node}", name=NAME, certificate=self.served.anchor)
        write_private(directory / LINK_FILE, msgspec.json.encode(file))

    def start(self, node: str, *words: str) -> None:
        output = (self.scratch / f"{node}.starter").open("ab")
        with output:
            self._starters[node] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "shoal.agent.starter"),
                    *(str(self.directory(node)), "--foreground", *words),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def engine(self) -> Head:
        return Head(self._door, self.context, self.keys)

    def directory(self, node: str) -> Path:
        return self.scratch / "nodes" / node

    def pid(self, node: str, which: str = "pid") -> int:
        """Of the agent or its keeper; 0 if there is none."""
        with contextlib.suppress(OSError, ValueError):
            said = json.loads((self.directory(node) / "agent.json").read_bytes())
            if variable(int(said["pid"]), AGENT_MARK) == str(self.directory(node)):
                return int(said[which])
        return 0

    def kill(self, node: str) -> None:
        before = self.pid(node)
        os.kill(before, signal.SIGKILL)
        lock = self.directory(node) / "agent.lock"
        until(lambda: not held(lock) or self.pid(node) not in (0, before), f"{node} lives")

    def end(self) -> None:
        for node in list(self._starters):
            (self.directory(node) / LINK_FILE).unlink()  # nobody would hear its last report
            self._starters[node].terminate()
        for starter in self._starters.values():
            starter.wait(WAIT_S)
        self._door.close()
        self.proxy.close()
