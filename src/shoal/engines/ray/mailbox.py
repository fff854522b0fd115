"""The mailbox: the actor on each Ray node that hands messages to and from the agent there.

It holds next to nothing: the newest inventory, what the agent ships of output at most, one death.
One relay at a time uses it, in a session; each session is one connection to the agent, so that
the next one gets everything again. It runs nothing itself: the starter starts the agent,
outside of Ray's reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.enduring import enduring
from shoal.engines.agentlink import AgentLink
from shoal.engines.ray.messages import Died
from shoal.engines.ray.render import MAILBOX_DIR
from shoal.model.report import NodeGone
from shoal.wire import FromAgent, Heard, ToAgent, encode

PULL_S = 2.0  # answer at least this often, so that silence means something
# A relay that has not asked for this long is gone; the agent's output then stays in its files.
FORSAKEN_S = 30.0
BACKLOG_BYTES_MAX = 16 * 1024 * 1024

_decode = msgspec.msgpack.Decoder(ToAgent).decode


class Overtaken(Exception):
    """This session is over: another took its place, or it was not used."""


class Mailbox:
    def __init__(self, node: str) -> None:
        self._directory = Path(os.environ[MAILBOX_DIR])
        self._node = node
        self._session: Session | None = None
        self._newest = 0

    async def open(self) -> int:
        """A new session replaces the old one."""
        await self._end()
        self._newest += 1
        self._session = Session(self._node, self._directory, self._newest)
        self._expect_again(self._session)
        return self._newest

    async def push(self, number: int, messages: list[bytes]) -> None:
        session = self._current(number)
        for data in messages:
            session.link.send(_decode(data))
        if session.link.backlog_bytes > BACKLOG_BYTES_MAX:
            await self._end()  # an agent that does not read: what was lost is sent again

    async def pull(self, number: int) -> list[bytes]:
        session = self._current(number)
        found = await session.news()
        self._expect_again(session)
        return found

    def _current(self, number: int) -> Session:
        if self._session is None or self._session.number != number:
            raise Overtaken(f"session {number} is over")
        return self._session

    def _expect_again(self, session: Session) -> None:
        session.expect(FORSAKEN_S, lambda: asyncio.ensure_future(self._end_if(session)))

    async def _end_if(self, session: Session) -> None:
        if self._session is session:
            await self._end()

    async def _end(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()


class Session:
    """One relay's use of the mailbox."""

    def __init__(self, node: str, directory: Path, number: int) -> None:
        self.number = number
        self.link = AgentLink(node, directory, self, None)
        self._task = asyncio.ensure_future(enduring(f"the link to {node}", self.link.keep))
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()
        self._heard: Heard | None = None
        self._death: Died | None = None
        self._logs: list[FromAgent] = []

    def said(self, message: FromAgent) -> None:
        if isinstance(message, Heard):
            self._heard = message  # inventories are complete: the newest is enough
        else:
            self._logs.append(message)  # as much as an agent ships without an answer
        self._news.set()

    def died(self, gone: NodeGone) -> None:
        self._death = Died(gone)
        self._news.set()

    async def news(self) -> list[bytes]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), PULL_S)
        self._news.clear()
        found = [m for m in (self._death, self._heard, *self._logs) if m is not None]
        self._heard, self._death, self._logs = None, None, []
        return [encode(message) for message in found]

    def expect(self, within_s: float, otherwise: Callable[[], object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(within_s, otherwise)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.link.disconnect()
