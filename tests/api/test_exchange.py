"""What an application answers becomes exactly one answer of HTTP/1.1, whatever it does wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from shoal.api.exchange import Exchange
from shoal.api.http import Receive, Send

Answer = Callable[[Receive, Send], Awaitable[None]]
OK = {"type": "http.response.start", "status": 200}
PLAIN = [(b"content-type", b"text/plain"), (b"content-length", b"5")]


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def answered(answer: Answer, method: str = "GET", *, keep_alive: bool = True) -> Wire:
    wire = Wire()

    async def run() -> None:
        exchange = Exchange(
            {"method": method, "path": "/x"},
            wire,
            FlowControl(wire),
            lambda: None,
            keep_alive=keep_alive,
            expects_continue=False,
        )
        exchange.end()
        await exchange.run_asgi(lambda _, receive, send: answer(receive, send))

    asyncio.run(run())
    return wire


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def hello(_: Receive, send: Send) -> None:
    await send({**OK, "headers": PLAIN})
    await send(body(b"hello"))


async def stream(_: Receive, send: Send) -> None:
    await send({**OK, "headers": []})
    await asyncio.sleep(0)  # nobody knows when there is something to send
    await send(body(b"hello", more=True))
    await send(body(b""))


async def split(_: Receive, send: Send) -> None:
    await send({**OK, "headers": [(b"location", b"/a\r\nset-cookie: b=c"), *PLAIN]})
    await send(body(b"hello"))


async def longer(_: Receive, send: Send) -> None:
    await send({**OK, "headers": PLAIN})
    await send(body(b"hello!"))


async def shorter(_: Receive, send: Send) -> None:
    await send({**OK, "headers": PLAIN})
    await send(body(b"hell"))


async def silent(*_: object) -> None: ...


async def failing(*_: object) -> None:
    raise RuntimeError("a mistake")


def test_an_answer_is_one_write() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5"
    assert answered(hello).writes == [head + b"\r\n\r\nhello"]
    assert answered(hello, "HEAD").writes == [head + b"\r\n\r\n"]
    last = answered(hello, keep_alive=False)
    assert last.writes == [head + b"\r\nconnection: close\r\n\r\nhello"]
    assert last.closed


def test_the_head_of_a_stream_does_not_wait_for_its_first_part() -> None:
    assert answered(stream).writes == [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
    ]


@pytest.mark.parametrize("answer", [silent, failing, split])
def test_an_application_that_does_not_answer_is_answered_for(answer: Answer) -> None:
    wire = answered(answer)
    failed = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close"
    assert wire.writes == [failed + b"\r\n\r\n"]
    assert wire.closed


@pytest.mark.parametrize("answer", [longer, shorter])
def test_an_answer_that_is_not_as_long_as_it_says_ends_the_connection(answer: Answer) -> None:
    wire = answered(answer)
    assert wire.closed
    assert wire.writes == []
