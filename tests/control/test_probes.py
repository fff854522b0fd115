"""A probe tells a server that does not answer from a controller that cannot ask."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterator

import pytest

from shoal.control import engine_reader
from shoal.control.engine_reader import LATE_S, Answer
from shoal.control.gateway_link import ask, greets
from shoal.model.service import Probe

PROBE = Probe(path="/", timeout_ms=300)


def asked(listener: socket.socket, probe: Probe = PROBE) -> int | None:
    host, port = listener.getsockname()
    return status(asyncio.run(ask(f"{host}:{port}", probe)))


def status(answer: Answer | None) -> int | None:
    return None if answer is None else answer.status


def answered(raw: bytes, probe: Probe) -> Answer | None:
    """What a probe sees of a server that says just this."""

    async def both() -> Answer | None:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(raw)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(say, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await ask(f"127.0.0.1:{port}", probe)

    return asyncio.run(both())


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
    assert status(asyncio.run(ask(f"{host}:{port}", PROBE))) == 0


@pytest.mark.parametrize("code", [200, 404, 503])
def test_any_status_is_an_answer(code: int) -> None:
    raw = f"HTTP/1.1 {code} So\r\n\r\n".encode()
    assert status(answered(raw, Probe(timeout_ms=20_000))) == code


OPENAI = Probe(path="/v1/models", models=True, timeout_ms=20_000)
ONE = b'{"object": "list", "data": [{"id": "tiny", "object": "model", "owned_by": "vllm"}]}'


def ok(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", *headers, b"", body])


@pytest.mark.parametrize(
    ("raw", "ready"),
    [
        (ok(ONE, b"Content-Length: %d" % len(ONE)), True),
        (ok(ONE), True),  # its end is the end of the connection
        (ok(b"%x\r\n%s\r\n0\r\n\r\n" % (len(ONE), ONE), b"Transfer-Encoding: chunked"), True),
        (ok(b'{"object": "list", "data": []}'), False),  # it answers, but has nothing loaded
        (ok(b"<html>hello</html>"), False),
        (ok(b'{"data": 7}'), False),
        (ok(b"\xff\xfe"), False),
        (b"HTTP/1.1 503 Loading model\r\n\r\n" + ONE, False),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", False),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", True),  # it wants a key, so it is up
        (b"nonsense\r\n\r\n", False),
        (ok(ONE[:20], b"Content-Length: %d" % len(ONE)), False),
        (ok(b"zz\r\n", b"Transfer-Encoding: chunked"), False),
        (ok(b" " * (2 << 20)), False),  # no more than a bound is read
    ],
)
def test_a_probe_for_models_is_answered_when_one_is_listed(raw: bytes, ready: bool) -> None:
    assert greets(answered(raw, OPENAI), OPENAI) is ready


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENETUNREACH])
def test_what_goes_wrong_here_says_nothing_of_the_server(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cannot(*_: object, **__: object) -> None:
        raise OSError(number, "not here")

    monkeypatch.setattr(engine_reader, "connect", cannot)
    assert asyncio.run(ask("127.0.0.1:9", PROBE)) is None


def test_a_controller_that_gets_no_time_does_not_blame_the_server(
    listener: socket.socket,
) -> None:
    async def starved() -> Answer | None:
        host, port = listener.getsockname()
        probing = asyncio.create_task(ask(f"{host}:{port}", PROBE))
        await asyncio.sleep(0.05)
        end_s = time.monotonic() + LATE_S + 1
        while time.monotonic() < end_s:
            pass  # the loop is held up, as by a long step
        return await probing

    assert asyncio.run(starved()) is None
