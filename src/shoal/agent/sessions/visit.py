"""One session of a user with a member: it comes back to the meeting until it is over."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.agent.faults import CannotStart
from shoal.client.address import SOCKET_NAME
from shoal.link.meeting import DONE, KEY_HEADER, NotAdmitted, dial, ws_error
from shoal.machine.files import LINK_FILE
from shoal.machine.listening import Listener, listeners, sockets_of
from shoal.model.session import SessionOrder
from shoal.sessions.streams import Broken, Ended, Signal, Stream, Streams, Word

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection


log = logging.getLogger("shoal.agent")

AWAY_S_MAX = 120.0  # without the client; then it is gone for good
PAUSE_S = (0.2, 2.0)  # between attempts to enter: the first, and the longest


class Visit:
    """`act` is what the session is for: it returns its last word. Whatever it started is gone when
    it returns or is cancelled."""

    def __init__(self, directory: Path, order: SessionOrder) -> None:
        self.order = order
        self.name = f"{order.ref.job}.{order.ref.member}"
        self.streams = Streams(self._hear, self._open)
        self.fixed = self.streams.fixed(order.request.kind)
        self.heard: Callable[[Word], None] = lambda _: None
        self.opened: Callable[[Stream, bytes], None] = lambda stream, _: stream.reset("refused")
        self._directory = directory
        self._met = asyncio.Event()
        self._ending: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    async def run(self, act: Callable[[Visit], Awaitable[Ended]]) -> None:
        keeping = asyncio.create_task(self._keep())
        acting = asyncio.ensure_future(self._act(act))
        try:
            every: list[asyncio.Future[Any]] = [keeping, acting, self._ending]
            await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
            if not keeping.done():
                last = acting.result() if acting.done() else self._ending.result()
                await self._stop(acting)
                self.streams.say(last)
                done, _ = await asyncio.wait([keeping], timeout=AWAY_S_MAX)
                if not done:
                    log.info("the client of a session with %s has not taken its end", self.name)
        finally:
            await self._stop(acting)
            await self._stop(keeping)
            self.streams.lost("the session is over")

    def end(self, why: str) -> None:
        """From outside: its member has ended, for example."""
        if not self._ending.done():
            self._ending.set_result(Ended(code=255, why=why))

    async def _act(self, act: Callable[[Visit], Awaitable[Ended]]) -> Ended:
        try:
            return await act(self)
        except CannotStart as error:
            return Ended(code=127, why=str(error))
        except OSError as error:
            return Ended(code=255, why=f"it failed on the node: {error}")

    @staticmethod
    async def _stop(task: asyncio.Future[Ended] | asyncio.Task[None]) -> None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task

    def _hear(self, word: Word) -> None:
        if isinstance(word, Signal):
            self.streams.used()
        self.heard(word)

    def _open(self, stream: Stream, about: bytes) -> None:
        self.opened(stream, about)

    async def _keep(self) -> None:
        """Until the client closes the session, or is away for too long."""
        since, pause_s = time.monotonic(), PAUSE_S[0]
        request = self.order.request
        while time.monotonic() - since < AWAY_S_MAX:
            try:
                channel = await enter(self._directory, request.meeting, request.key)
            except (OSError, TimeoutError, ws_error()) as error:
                log.debug("a session with %s waits for its client: %s", self.name, error)
            else:
                before = time.monotonic()
                try:
                    await self.streams.reliable.carry(channel)
                except (Broken, msgspec.DecodeError, ValueError) as error:
                    log.warning("a session with %s broke off: %s", self.name, error)
                    return
                except (OSError, TimeoutError, ws_error()):
                    pass
                finally:
                    with contextlib.suppress(Exception):
                        await channel.close(DONE)
                if channel.close_code == DONE:
                    return
                if self.streams.reliable.met_at >= before:
                    since, pause_s = time.monotonic(), PAUSE_S[0]
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_S[1], 2 * pause_s)


# How this node's agent reaches meetings at the head: as it reaches the head itself, never by an
# address that a user names.


async def enter(directory: Path, meeting: str, key: str) -> ClientConnection:
    """NotAdmitted if the head does not know the meeting, OSError if no head answers."""
    path, headers = f"/v1/meetings/{meeting}/enter", {KEY_HEADER: key}
    if not (directory / LINK_FILE).exists():  # a node of the head's own machine
        socket = directory.parent.parent / SOCKET_NAME
        return await dial("http://localhost", path, headers, "", "", socket)
    from shoal.agent.dialling import read_link_file

    try:
        file = read_link_file(directory)
    except ValueError as error:
        raise OSError(str(error)) from None
    problem: Exception = OSError(f"{LINK_FILE} names no URL")
    for url, name in file.ways.items():
        try:
            return await dial(url, path, headers, name, file.certificate)
        except NotAdmitted:
            raise
        except (OSError, TimeoutError, ws_error()) as error:
            problem = error
    raise OSError(str(problem) or "no answer") from problem


# On which ports a member listens. Others of its node are not reached through a session.


SHOWN_MAX = 8


class Unheard(Exception):
    """No process of the member listens on the port; the message says so, and what it does."""


class Ports:
    """`pids`: the processes of the member, as they are now."""

    def __init__(self, name: str, pids: Callable[[], Iterable[int]]) -> None:
        self._name = name
        self._pids = pids
        self._known: set[int] = set()  # inodes of its listeners: looked for only once

    def find(self, port: int) -> Listener:
        every = listeners()
        asked = [one for one in every if one.port == port]
        own = self._own(asked)
        if own:
            return min(own, key=lambda one: not ipaddress.ip_address(one.address).is_loopback)
        others = sorted({one.port for one in self._own(every)})
        shown = ", ".join(map(str, others[:SHOWN_MAX])) + (
            ", ..." if len(others) > SHOWN_MAX else ""
        )
        hint = f"it listens on {shown}" if others else "it listens on no port"
        raise Unheard(f"no process of {self._name} listens on port {port}; {hint}")

    def _own(self, listeners: list[Listener]) -> list[Listener]:
        if listeners and not any(one.inode in self._known for one in listeners):
            self._known = sockets_of(self._pids())
        return [one for one in listeners if one.inode in self._known]
