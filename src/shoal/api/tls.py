"""Accepts connections and speaks TLS with them, within bounds, before they become requests.

asyncio would keep a connection whose handshake never ends for a minute, uncounted. Here each
connection has a place in the gate from the moment it is accepted, and a short time to finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

import msgspec

from shoal.api.handling import handles
from shoal.api.http import Request
from shoal.api.limits import LINGER_S, Gate, Guard
from shoal.api.problems import Refusal
from shoal.calls.page import MachineCalls
from shoal.link.http import last_answer
from shoal.model.views import Problem

HANDSHAKE_S = 10.0
PAUSE_S = 0.1  # after a failure to accept: no descriptor is free
TLS_HANDSHAKE = b"\x16"  # the first byte of every TLS connection
PLAIN_BYTES = 64 * 1024
PLAIN = "this port speaks TLS; use https:// instead of http://"


class Arrival:
    """A connection whose handshake is under way."""

    def __init__(self, link: socket.socket, address: str) -> None:
        self.link = link
        self.address = address
        self.task: asyncio.Task[None] | None = None

    def dismiss(self) -> None:
        if self.task is not None:
            self.task.cancel()


class TlsListener:
    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        gate: Gate,
        protocol: Callable[[], Guard],
    ) -> None:
        self._listener = listener
        self._context = context
        self._gate = gate
        self._protocol = protocol
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        while True:
            try:
                link, peer = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            arrival = Arrival(link, str(peer[0]))
            if not self._gate.enter(arrival):
                link.close()
                continue
            arrival.task = asyncio.create_task(self._receive(arrival))
            self._tasks.add(arrival.task)
            arrival.task.add_done_callback(self._tasks.discard)

    async def _receive(self, arrival: Arrival) -> None:
        loop, link = asyncio.get_running_loop(), arrival.link

        def protocol() -> Guard:
            made = self._protocol()
            made.arrival = arrival
            return made

        try:
            async with asyncio.timeout(HANDSHAKE_S):
                first = await _peek(link)
            if first == TLS_HANDSHAKE:
                await loop.connect_accepted_socket(
                    protocol,
                    link,
                    ssl=self._context,
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=LINGER_S,
                )
                return
            if first:
                await _refuse_plain(link)
            link.close()
        except (OSError, TimeoutError):  # an error of TLS is an OSError, too
            link.close()
        except asyncio.CancelledError:
            link.close()
            raise
        finally:
            self._gate.leave(arrival)


async def _peek(link: socket.socket) -> bytes:
    """The first byte, which stays to be read."""
    loop = asyncio.get_running_loop()
    link.setblocking(False)
    while True:
        try:
            return link.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            readable = asyncio.Event()
            loop.add_reader(link, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(link)


async def _refuse_plain(link: socket.socket) -> None:
    """One line for somebody who wrote http:// or left the scheme out."""
    loop = asyncio.get_running_loop()
    body = msgspec.json.encode(Problem(message=PLAIN))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await loop.sock_recv(link, PLAIN_BYTES)
            await loop.sock_sendall(link, last_answer(400, body))
            link.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(link, PLAIN_BYTES):
                pass


# The certificate that clients keep when they log in: they compare its fingerprint first.


STATE = "certificate"  # in the app's state: returns it as PEM


class Certificate:
    @handles(MachineCalls.certificate, media_type="application/x-pem-file")
    def certificate(self, request: Request) -> str:
        found = request.app.state.get(STATE)
        if found is None:
            raise Refusal(404, "this cluster does not use TLS")
        return str(found())
