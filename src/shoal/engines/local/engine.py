"""Starts the agents of this machine, stays connected to them, and knows for certain who died."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from shoal.files import held, write_private
from shoal.kernel import AGENT_MARK
from shoal.model.commands import Envelope
from shoal.model.node import NodeSpec
from shoal.model.report import NodeGone
from shoal.ports import Inbox
from shoal.wire import (
    CHECKPOINT_ROOT,
    Ask,
    FromAgent,
    Heard,
    Kept,
    Link,
    Log,
    Orders,
    ToAgent,
    short_path,
)

log = logging.getLogger("shoal.local")

CONNECT_PAUSE_S = 0.02
DEATH_POLL_S = 0.01
# An agent that dies is started again: soon at first, ever later if it keeps dying.
RESTART_FIRST_S = 2.0
RESTART_MAX_S = 60.0
HEALTHY_AFTER_S = 10.0


class LocalEngine:
    def __init__(self, nodes: Iterable[NodeSpec], root: Path, checkpoints: Path) -> None:
        # Who started the cluster may have named another place, such as a disk with more room.
        env = {CHECKPOINT_ROOT: str(checkpoints), **os.environ}
        self._nodes = {spec.id: AgentLink(spec, root / spec.id, env) for spec in nodes}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, inbox: Inbox) -> None:
        self._tasks = [asyncio.create_task(node.keep(inbox)) for node in self._nodes.values()]

    def send(self, node: str, envelope: Envelope) -> None:
        if node in self._nodes:
            self._nodes[node].send(Orders(envelope))

    async def resend(self) -> None:
        for node in self._nodes.values():
            node.tell_again()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self._nodes.values():
            node.disconnect()


class AgentLink:
    """One agent: connected, or being started, or known to be dead."""

    def __init__(self, spec: NodeSpec, directory: Path, env: dict[str, str]) -> None:
        self._spec = spec
        self._directory = directory
        self._env = env
        self._link: Link | None = None
        self._lost = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._inbox: Inbox | None = None
        self._incarnation = 0
        self._death: NodeGone | None = None

    async def keep(self, inbox: Inbox) -> None:
        """For ever: be connected to the agent, or see to it that there is one."""
        self._inbox = inbox
        restart_s = RESTART_FIRST_S
        while True:
            if not held(self._directory / "agent.lock"):
                self._start()
            since = time.monotonic()
            if await self._connect():
                await self._lost.wait()
            if time.monotonic() - since > HEALTHY_AFTER_S:
                restart_s = RESTART_FIRST_S
            if await self._died():
                self._announce_death()
                await asyncio.sleep(restart_s)
                restart_s = min(RESTART_MAX_S, restart_s * 2)

    def send(self, message: ToAgent) -> None:
        if self._link is not None:
            self._link.send(message)

    def tell_again(self) -> None:
        self.send(Ask())
        if self._death is not None and self._inbox is not None:
            self._inbox.gone(self._death)

    def disconnect(self) -> None:
        if self._link is not None:
            self._link.close()

    def _start(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._directory / "spec.json", msgspec.json.encode(self._spec))
        with (self._directory / "agent.log").open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal.agent", str(self._directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
                env={**self._env, AGENT_MARK: str(self._directory)},
            )

    async def _connect(self) -> bool:
        """Until connected, or until the agent is gone."""
        loop = asyncio.get_running_loop()
        self._lost.clear()
        while True:
            with contextlib.suppress(OSError), short_path(self._directory / "agent.sock") as path:
                await loop.create_unix_connection(self._new_link, path)
                return True
            await asyncio.sleep(CONNECT_PAUSE_S)
            starting = self._process is not None and self._process.poll() is None
            if not starting and not held(self._directory / "agent.lock"):
                return False

    def _new_link(self) -> Link:
        return Link(FromAgent, self._opened, self._received, self._closed)

    def _opened(self, link: Link) -> None:
        self._link = link

    def _closed(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._lost.set()

    def _received(self, message: FromAgent | ToAgent) -> None:
        assert self._inbox is not None
        match message:
            case Heard(report):
                self._incarnation = report.incarnation
                self._death = None
                self._inbox.heard(report)
            case Log(chunk):
                self.send(Kept(chunk.ref, self._inbox.log(chunk)))

    async def _died(self) -> bool:
        """The keeper lets go of the lock when every process of the node is gone. A connection
        can also break without a death; then the agent answers again."""
        while held(self._directory / "agent.lock"):
            if self._process is not None:
                self._process.poll()  # reap the keeper
            await asyncio.sleep(DEATH_POLL_S)
            with contextlib.suppress(OSError), short_path(self._directory / "agent.sock") as path:
                _, writer = await asyncio.open_unix_connection(path)
                writer.close()
                return False
        return True

    def _announce_death(self) -> None:
        log.warning("the agent of %s is dead", self._spec.id)
        if self._incarnation and self._inbox is not None:
            self._death = NodeGone(
                self._spec.id, self._incarnation, "its agent died, and its processes with it"
            )
            self._inbox.gone(self._death)
