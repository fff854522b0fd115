"""The controller's side of the Ray engine: keeps a relay running and speaks through it.

The relay is a process of its own because Ray ends its drivers as it sees fit: when the head is
gone for a while, a relay ends and the next one takes over, and the controller notices nothing but
silence.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from shoal.enduring import enduring
from shoal.engines.ray.messages import Died, FromNode, FromPost, ToNode
from shoal.engines.ray.render import environment, without_ray
from shoal.model.commands import Envelope
from shoal.model.report import NodeGone
from shoal.ports import Inbox
from shoal.wire import (
    Ask,
    Commands,
    Handed,
    Heard,
    Kept,
    Link,
    Log,
    Need,
    Piece,
    ToAgent,
    Wants,
    encode,
)

log = logging.getLogger("shoal.ray")

PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 10.0
HEALTHY_AFTER_S = 20.0
# A relay with this much waiting for it is restarted.
BACKLOG_BYTES_MAX = 64 * 1024 * 1024
PIECES_BYTES_MAX = BACKLOG_BYTES_MAX // 4  # of packages, so that commands always find room

_decode = msgspec.msgpack.Decoder(FromPost).decode


class RayEngine:
    fences = False  # a node that cannot be reached cannot be ended

    def __init__(self, home: Path, address: str) -> None:
        self._home = home
        self._address = address
        self._inbox: Inbox | None = None
        self._task: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._closed = asyncio.Event()
        self._nodes: dict[str, int] = {}  # heard of through this relay, in which session
        self._deaths: dict[str, NodeGone] = {}

    async def start(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._task = asyncio.create_task(enduring("the relay's starter", self._keep_relay))

    def send(self, node: str, envelope: Envelope) -> None:
        self._tell(node, Commands(envelope))

    async def resend(self) -> None:
        for node in self._nodes:
            self._tell(node, Ask())
        if self._inbox is not None:
            for gone in list(self._deaths.values()):
                self._inbox.gone(gone)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- the relay -----------------------------------------------------------------------

    async def _keep_relay(self) -> None:
        pause_s = PAUSE_FIRST_S
        while True:
            since = time.monotonic()
            try:
                code = await self._run_relay()
            except OSError as error:
                log.error("the relay cannot be started: %s", error)
            else:
                log.warning("the relay ended with %s; starting it again", code)
            if time.monotonic() - since > HEALTHY_AFTER_S:
                pause_s = PAUSE_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, pause_s * 2)

    async def _run_relay(self) -> int:
        ours, theirs = socket.socketpair()
        self._closed.clear()
        self._nodes = {}
        try:
            process = self._start_relay(theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(
                lambda: Link(FromNode, self._opened, self._received, self._lost), sock=ours
            )
            await self._closed.wait()
        finally:
            if self._link is not None:
                self._link.close()
            process.kill()
            code = await asyncio.to_thread(process.wait)
        return code

    def _start_relay(self, end: socket.socket) -> subprocess.Popen[bytes]:
        handle = end.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.engines.ray.relay", self._address, str(handle)],
            stdin=subprocess.DEVNULL,
            pass_fds=[handle],
            cwd="/",
            env={**without_ray(dict(os.environ)), **environment(self._home)},
        )

    def _opened(self, link: Link) -> None:
        self._link = link

    def _lost(self, link: Link) -> None:
        if self._link is link:
            self._link = None
            self._closed.set()

    # -- messages --------------------------------------------------------------------------

    def _tell(self, node: str, message: ToAgent) -> None:
        if self._link is None:
            return  # commands are derived again from reports
        if self._link.backlog_bytes > BACKLOG_BYTES_MAX:
            log.error("the relay takes no messages; restarting it")
            self._link.close()
            return
        self._link.send(ToNode(node, encode(message)))

    def _received(self, brought: FromNode) -> None:
        assert self._inbox is not None
        message: FromPost = _decode(brought.data)
        if self._nodes.get(brought.node) != brought.session:
            self._nodes[brought.node] = brought.session
            self._tell(brought.node, Ask())  # so that its agent knows that a controller answers
        match message:
            case Heard(report):
                death = self._deaths.get(brought.node)
                if death is not None and death.incarnation < report.incarnation:
                    del self._deaths[brought.node]
                self._inbox.heard(report)
            case Log(chunk):
                self._tell(brought.node, Kept(chunk.ref, self._inbox.log(chunk)))
            case Need(package, offset):
                # Many nodes may want it at once; a node without an answer asks again.
                if self._link is not None and self._link.backlog_bytes < PIECES_BYTES_MAX:
                    self._tell(brought.node, Piece(self._inbox.piece(package, offset)))
            case Wants(wanted):
                found = self._inbox.secrets_of(brought.node, wanted)
                if found is not None:
                    self._tell(brought.node, Handed(found))
            case Died(gone):
                self._deaths[brought.node] = gone
                self._inbox.gone(gone)
