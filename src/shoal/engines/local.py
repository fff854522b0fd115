"""Starts the agents of this machine, stays connected, and knows for certain which have died."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from shoal.engines.agentlink import AgentLink, StartAgent, Starting, start_agent, write_spec
from shoal.link.wire import (
    CHECKPOINT_ROOT,
    AsBefore,
    Ask,
    Commands,
    Enter,
    FileKept,
    Finds,
    FromAgent,
    GivesFile,
    Handed,
    Heard,
    Joined,
    Joins,
    Keep,
    Kept,
    Log,
    Need,
    Opens,
    Piece,
    Seeks,
    Wants,
    WantsFile,
)
from shoal.machine.enduring import enduring
from shoal.machine.paths import Hangs
from shoal.model.commands import Envelope, Fence
from shoal.model.kept import FileAnswer
from shoal.model.node import NodeSpec
from shoal.model.report import NodeGone
from shoal.model.session import SessionOrder
from shoal.ports import Inbox


class LocalEngine:
    fences = True

    def __init__(
        self,
        nodes: Iterable[NodeSpec],
        root: Path,
        checkpoints: Path,
        start: StartAgent = start_agent,
    ) -> None:
        # The operator may have named another directory, such as a disk with more room.
        env = {CHECKPOINT_ROOT: str(checkpoints), **os.environ}
        self._nodes = {spec.id: LocalNode(spec, root / spec.id, env, start) for spec in nodes}
        self._tasks: list[asyncio.Task[None]] = []

    def __contains__(self, node: str) -> bool:
        return node in self._nodes

    async def start(self, inbox: Inbox) -> None:
        for node in self._nodes.values():
            node.inbox = inbox
        self._tasks = [
            asyncio.create_task(enduring(f"the link to {name}", node.link.keep))
            for name, node in self._nodes.items()
        ]

    def send(self, node: str, envelope: Envelope) -> None:
        if node in self._nodes:
            self._nodes[node].link.send(Commands(envelope))
            for command in envelope.commands:
                if isinstance(command, Fence):
                    self._nodes[node].link.fence(command.incarnation)

    def invite(self, node: str, order: SessionOrder | FileAnswer) -> bool:
        link = self._nodes[node].link
        link.send(FileKept(order) if isinstance(order, FileAnswer) else Enter(order))
        return link.up

    async def resend(self) -> None:
        for node in self._nodes.values():
            node.link.tell_again()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for node in self._nodes.values():
            node.link.disconnect()


class LocalNode:
    """Passes messages between one agent and the controller's inbox."""

    inbox: Inbox

    def __init__(
        self, spec: NodeSpec, directory: Path, env: dict[str, str], start: StartAgent
    ) -> None:
        self._spec = spec
        self._directory = directory
        self._env = env
        self._start_agent = start
        self.link = AgentLink(spec.id, directory, self, self._start)

    def _start(self) -> Starting:
        write_spec(self._directory, self._spec)
        return self._start_agent(self._directory, self._env)

    def said(self, message: FromAgent) -> None:
        match message:
            case Heard(report):
                self.inbox.heard(report)
            case AsBefore(still):
                if not self.inbox.still(still):
                    self.link.send(Ask())
            case Log(chunk):
                self.link.send(Kept(chunk.ref, self.inbox.log(chunk)))
            case Need(package, offset):
                with contextlib.suppress(Hangs):
                    self.link.send(Piece(self.inbox.piece(package, offset)))
            case Wants(wanted):
                found = self.inbox.secrets_of(self._spec.id, wanted)
                if found is not None:
                    self.link.send(Handed(found))
            case Keep(what) if self.inbox.files is not None:
                self.inbox.files.take(
                    what, self._spec.id, lambda answer: self.link.send(FileKept(answer))
                )
            case WantsFile(wanted) if self.inbox.files is not None:
                sent = self.inbox.files.give(wanted, self._spec.id)
                if sent is not None:
                    self.link.send(GivesFile(sent))
            case Opens(door) if self.inbox.blocks is not None:
                self.inbox.blocks.opens(self._spec.id, door)
            case Seeks(seek) if self.inbox.blocks is not None:
                self.inbox.blocks.seek(
                    seek, self._spec.id, lambda sought: self.link.send(Finds(sought))
                )
            case Joins(end) if self.inbox.tunnels is not None:
                self.inbox.tunnels.joins(
                    end, self._spec.id, lambda tunnel: self.link.send(Joined(tunnel))
                )

    def died(self, gone: NodeGone) -> None:
        self.inbox.gone(gone)
