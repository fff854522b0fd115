"""HTTP by hand: answers in every framing that a server may choose, and kept connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from shoal.link.http import Line, Relay, request_head

GET = request_head("GET", b"/", [(b"host", b"x")])
Story = Callable[[Relay, str], Coroutine[Any, Any, None]]


def served(answers: list[bytes], story: Story) -> int:
    """Each answer is for one request; returns how many connections were made."""
    made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        try:
            while answers:
                await reader.readuntil(b"\r\n\r\n")
                answer = answers.pop(0)
                writer.write(answer)
                await writer.drain()
                if b"close" in answer or b"length" not in answer:
                    break
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        relay = Relay(ssl.create_default_context)
        async with server:
            await story(relay, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            relay.close()

    asyncio.run(run())
    return made


async def whole(line: Line, head: bytes = GET) -> tuple[int, bytes]:
    line.begin(head)
    status, _ = await line.head()
    body = b""
    while piece := await line.piece():
        body += piece
    return status, body


async def alone(relay: Relay, url: str, head: bytes = GET) -> tuple[int, bytes]:
    line = await relay.take(url)
    try:
        return await whole(line, head)
    finally:
        line.abort()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc", (200, b"abc")),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\nabcd", (200, b"abc")),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 OK\r\ncontent-length: 1\r\n\r\na",
            (201, b"a"),
        ),
        (b"HTTP/1.0 200 OK\n\nup to the end", (200, b"up to the end")),
        (b"HTTP/1.1 204 No Content\r\nlength: none\r\n\r\n", (204, b"")),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
            b"3;x=y\r\nabc\r\n1\r\nd\r\n0\r\ntrailer: 1\r\n\r\n",
            (200, b"abcd"),
        ),
    ],
)
def test_every_framing_is_read(raw: bytes, expected: tuple[int, bytes]) -> None:
    async def story(relay: Relay, url: str) -> None:
        assert await alone(relay, url) == expected

    served([raw], story)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\nconnection: close\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\nconnection: close\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"HTTP/1.1 200 " + b"x" * 200_000,
    ],
)
def test_what_is_not_a_whole_answer_is_an_error(raw: bytes) -> None:
    async def story(relay: Relay, url: str) -> None:
        with pytest.raises(OSError):  # noqa: PT011
            await alone(relay, url)

    served([raw], story)


def test_a_connection_is_kept_for_the_next_request_unless_something_is_odd() -> None:
    plain = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na"

    async def story(relay: Relay, url: str) -> None:
        for _ in range(3):
            line = await relay.take(url)
            assert await whole(line) == (200, b"a")
            relay.give(line)
        line._reader.feed_data(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nz")
        assert await alone(relay, url) == (200, b"a"), "not what nobody had asked for"

    assert served([plain] * 4, story) == 2


def test_an_answer_to_head_has_no_body_however_long_it_says_it_is() -> None:
    async def story(relay: Relay, url: str) -> None:
        head = request_head("HEAD", b"/", [(b"host", b"x")])
        assert await alone(relay, url, head) == (200, b"")

    served([b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n"], story)
