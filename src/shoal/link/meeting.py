"""Connections through the head, for two ends that cannot reach each other (ADR 33).

A *host* opens a meeting at the head with its token. *Guests* enter it with the meeting's key. For
each guest the host gets one connection, and the head passes bytes on in both directions. Both ends
use an ordinary socket: a thread moves its bytes into a websocket and back.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from shoal.client.keepalive import keep_alive
from shoal.client.transport import Endpoint, connected, trust_in

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

Result = TypeVar("Result")

log = logging.getLogger("shoal.link.meeting")
wire_log = logging.getLogger("shoal.link.meeting.wire")
wire_log.setLevel(logging.WARNING)  # the library would log tokens and keys

KEY_HEADER = "x-shoal-meeting-key"  # a guest's: the key; a host's: its SHA-256, in hex
MESSAGE_BYTES_MAX = 256 * 1024
PIECE_BYTES = 64 * 1024
OPEN_S_MAX = 10.0
PING_S = 20.0  # so that proxies on the way keep an idle connection
RETRY_S = (0.2, 2.0)  # the first pause and the longest
LAST_WORDS_S_MAX = 2.0  # for what was written before the end
TURNS_TO_CLOSE = 4  # of the event loop, until a transport that was closed is gone
PARTNER_GONE = 4001  # the code with which the head closes: the other end is gone
DONE = 1000


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What a guest needs to know. The head's certificate must be for `name`, which the host has
    verified, whatever the address; it is verified with `certificate`, or by the guest's system."""

    urls: tuple[str, ...]  # of the head; the first that answers is used
    meeting: str
    key: str
    name: str
    certificate: str = ""


class Opening(msgspec.Struct, frozen=True):
    """The head's first message to a host: where it can be reached, as far as it knows."""

    urls: tuple[str, ...]


class Announced(msgspec.Struct, frozen=True):
    """The head's later messages to a host: a guest waits."""

    guest: int


class NotAdmitted(OSError):
    """The head is there, and knows no such meeting or not this key."""


class Way:
    """The way between two ends. It is `broken` if the head or the network failed on our side, so
    that nothing is known about the other end."""

    def __init__(self) -> None:
        self.broken = False


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class _Thread:
    """An event loop in a thread of its own, and the tasks that it was given."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="shoal-meeting", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Called in the loop's thread."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self, first: Callable[[], object] = lambda: None) -> None:
        async def end() -> None:
            await asyncio.sleep(0)  # one that has not begun could not clear up
            first()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=LAST_WORDS_S_MAX)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for _ in range(TURNS_TO_CLOSE):
                await asyncio.sleep(0)
            self.loop.stop()

        if self._thread.is_alive():
            self.call(end())
            self._thread.join(OPEN_S_MAX)


class Host:
    """Holds a meeting open, through restarts of the head, until it is closed. `welcome` gets a
    connection for each guest; it is called in another thread and must be quick."""

    def __init__(self, endpoint: Endpoint, welcome: Callable[[socket.socket, Way], None]) -> None:
        self._endpoint, self._url = endpoint, endpoint.url
        self._heads = [endpoint, *map(endpoint.moved_to, endpoint.all_urls[1:])]
        self._headers = {"Authorization": f"Bearer {endpoint.token}"}
        self._welcome = welcome
        self._meeting, self._key = secrets.token_hex(16), secrets.token_urlsafe(32)
        self._thread = _Thread()

    def open(self) -> Invitation:
        """Returns when the head holds the meeting."""
        first = threading.Event()
        found: list[Opening | BaseException] = []

        def tell(opening: Opening | BaseException) -> None:
            if not first.is_set():
                found.append(opening)
                first.set()

        async def begin() -> asyncio.Task[None]:
            return self._thread.spawn(self._listen(tell))

        self._listening = self._thread.call(begin()).result()
        self._listening.add_done_callback(lambda task: tell(_failure(task)))
        if not first.wait(2 * OPEN_S_MAX):
            found.append(TimeoutError(f"{self._url} opens no meeting"))
        opening = found[0]
        if isinstance(opening, BaseException):
            self.close()
            if isinstance(opening, OSError):
                raise opening
            raise OSError(f"{self._url} opens no meeting: {opening!r}") from opening
        return Invitation(
            urls=tuple(dict.fromkeys((*opening.urls, *self._endpoint.all_urls))),
            meeting=self._meeting,
            key=self._key,
            name=self._endpoint.host,
            certificate=self._endpoint.certificate,
        )

    def close(self) -> None:
        """Whatever `welcome` got should be closed before."""
        self._thread.stop(self._listening.cancel)

    async def _listen(self, tell: Callable[[Opening | BaseException], None]) -> None:
        path = f"/v1/meetings/{self._meeting}/host"
        headers = {**self._headers, KEY_HEADER: key_hash(self._key)}
        pause_s = RETRY_S[0]
        while True:
            try:
                channel = await self._dial(path, headers)
                try:
                    tell(msgspec.json.decode(await channel.recv(), type=Opening))
                    pause_s = RETRY_S[0]
                    async for message in channel:
                        guest = msgspec.json.decode(message, type=Announced).guest
                        self._thread.spawn(self._receive(guest))
                finally:
                    await channel.close(DONE)  # ends the meeting, unless it broke before
            except (OSError, ws_error()) as error:
                log.debug("the meeting at %s is interrupted: %s", self._url, error)
                if isinstance(error, NotAdmitted):
                    tell(error)
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_S[1], 2 * pause_s)

    async def _dial(self, path: str, headers: dict[str, str]) -> ClientConnection:
        """The head that answered last is tried first."""
        for head in self._heads:
            try:
                made = await dial(head.url, path, headers, head.host, head.certificate, head.socket)
            except NotAdmitted:
                raise
            except (OSError, ws_error()):
                if head is self._heads[-1]:
                    raise
                continue
            self._heads.sort(key=lambda one: one is not head)
            return made
        raise AssertionError

    async def _receive(self, guest: int) -> None:
        path = f"/v1/meetings/{self._meeting}/guests/{guest}"
        try:
            channel = await self._dial(path, self._headers)
        except (OSError, ws_error()) as error:
            log.debug("guest %d was not reached: %s", guest, error)
            return
        await self._met(channel)

    async def _met(self, channel: ClientConnection) -> None:
        """A guest is here, in the loop of this host's thread."""
        (ours, theirs), way = socket.socketpair(), Way()
        self._welcome(ours, way)
        await _carry(channel, theirs, way)


class Guest:
    """Enters a meeting, as often as needed."""

    def __init__(self, invitation: Invitation) -> None:
        self._invitation = invitation
        self._thread = _Thread()

    def enter(self) -> socket.socket:
        """A connection to the host. Raises NotAdmitted if the head does not know the meeting, and
        OSError if no head answers."""
        return self._thread.call(self._enter()).result(3 * OPEN_S_MAX)

    async def _enter(self) -> socket.socket:
        asked = self._invitation
        path, problem = f"/v1/meetings/{asked.meeting}/enter", OSError("there is no address")
        for url in asked.urls:
            try:
                channel = await _dial_named(url, path, {KEY_HEADER: asked.key}, asked)
            except NotAdmitted:
                raise
            except (OSError, ws_error()) as error:
                problem = error if isinstance(error, OSError) else OSError(str(error))
                continue
            ours, theirs = socket.socketpair()
            self._thread.spawn(_carry(channel, theirs, Way()))
            return ours
        raise problem

    def close(self) -> None:
        self._thread.stop()


async def _dial_named(
    url: str, path: str, key: dict[str, str], asked: Invitation
) -> ClientConnection:
    """Behind a proxy, a head has the name that the host used; one of several heads has its own."""
    try:
        return await dial(url, path, key, asked.name, asked.certificate)
    except ssl.SSLCertVerificationError:
        own = urlsplit(url).hostname or ""
        if own == asked.name:
            raise
        return await dial(url, path, key, own, asked.certificate)


def _failure(task: asyncio.Task[None]) -> BaseException:
    """Why it ended, which it does only when it is cancelled or wrong."""
    if task.cancelled():
        return TimeoutError("the meeting was closed")
    return task.exception() or TimeoutError("the meeting has ended")


def ws_error() -> type[Exception]:
    from websockets.exceptions import WebSocketException

    return WebSocketException


async def open_channel(
    address: str, headers: Any, open_s: float, ping_s: float | None, **how: Any
) -> ClientConnection:
    """A websocket whose messages are bounded, and wait at their sender."""
    from websockets.asyncio.client import connect

    return await connect(
        address,
        additional_headers=headers,
        **how,
        proxy=None,
        compression=None,
        open_timeout=open_s,
        ping_interval=ping_s,
        ping_timeout=None,  # the kernel notices a peer that vanished
        close_timeout=1.0,
        max_size=MESSAGE_BYTES_MAX,
        max_queue=4,
        write_limit=PIECE_BYTES,
        logger=wire_log,
    )


async def dial(
    url: str,
    path: str,
    headers: dict[str, str],
    name: str,
    certificate: str,
    local: Path | None = None,
) -> ClientConnection:
    """`local`: the socket file of a head on this machine, which is used instead of the URL."""
    from websockets.exceptions import InvalidStatus

    address = f"ws{url.removeprefix('http')}{path}"
    how: dict[str, Any] = {}
    if local is not None:
        address, how = f"ws://localhost{path}", {"sock": connected(local, OPEN_S_MAX)}
        how["sock"].setblocking(False)
    elif address.startswith("wss:"):
        how = {"ssl": trust_in(certificate), "server_hostname": name}
    try:
        channel = await open_channel(address, headers, OPEN_S_MAX, PING_S, **how)
    except InvalidStatus as error:
        status = error.response.status_code
        if status == 403:
            raise NotAdmitted(f"{url} knows no such meeting, or the token is wrong") from None
        raise OSError(f"{url} answered with status {status}") from None
    if local is None:
        keep_alive(channel.transport.get_extra_info("socket"))
    return channel


async def _carry(channel: ClientConnection, end: socket.socket, way: Way) -> None:
    """Moves bytes until either end is closed."""
    end.setblocking(False)
    loop = asyncio.get_running_loop()

    async def outward() -> None:
        while data := await loop.sock_recv(end, PIECE_BYTES):
            await channel.send(data)

    async def inward() -> None:
        async for message in channel:
            await loop.sock_sendall(end, message if isinstance(message, bytes) else b"")

    moving = [asyncio.create_task(outward()), asyncio.create_task(inward())]
    try:
        await asyncio.wait(moving, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in moving:
            task.cancel()
        try:
            await asyncio.gather(*moving, return_exceptions=True)
            await channel.close(DONE)
        finally:
            channel.transport.abort()
            way.broken = channel.close_code not in (DONE, PARTNER_GONE)
            end.close()
