"""A probe tells a server that does not answer from a controller that cannot ask."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterator

import pytest

from shoal.control import gateway_link as gateway_link
from shoal.control.gateway_link import ask
from shoal.model.service import Probe

PROBE = Probe(path="/", timeout_ms=300)


def asked(listener: socket.socket, probe: Probe = PROBE) -> int | None:
    host, port = listener.getsockname()
    return asyncio.run(ask(f"{host}:{port}", probe))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    made = socket.create_server(("127.0.0.1", 0))
    yield made
    made.close()


def test_a_server_that_accepts_and_says_nothing_does_not_answer(listener: socket.socket) -> None:
    assert asked(listener) == 0


def test_a_server_that_is_gone_does_not_answer(listener: socket.socket) -> None:
    host, port = listener.getsockname()
    listener.close()
    assert asyncio.run(ask(f"{host}:{port}", PROBE)) == 0


@pytest.mark.parametrize("status", [200, 404, 503])
def test_any_status_is_an_answer(status: int) -> None:
    async def both() -> int | None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(f"HTTP/1.1 {status} So\r\n\r\n".encode())
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await ask(f"127.0.0.1:{port}", Probe(timeout_ms=20_000))

    assert asyncio.run(both()) == status


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENETUNREACH])
def test_what_goes_wrong_here_says_nothing_of_the_server(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cannot(*_: object) -> None:
        raise OSError(number, "not here")

    monkeypatch.setattr(asyncio, "open_connection", cannot)
    assert asyncio.run(ask("127.0.0.1:9", PROBE)) is None


def test_a_controller_that_gets_no_time_does_not_blame_the_server(
    listener: socket.socket,
) -> None:
    async def starved() -> int | None:
        host, port = listener.getsockname()
        probing = asyncio.create_task(ask(f"{host}:{port}", PROBE))
        await asyncio.sleep(0.05)
        end_s = time.monotonic() + gateway_link.LATE_S + 1
        while time.monotonic() < end_s:
            pass  # the loop is held up, as by a long step
        return await probing

    assert asyncio.run(starved()) is None
