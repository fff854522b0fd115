"""Sends chats to an engine or a router at given times, and looks at every token that comes."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import httptools

from bench.token_traces import BLOCK, Request

CONTENT = re.compile(rb'"(?:content|text)": ?"[^"]')
WAIT_S = 120.0  # for an answer
FILLER = " ".join(["abc"] * (BLOCK - 1))  # four characters a token, with its space


class Target(NamedTuple):
    """Where requests go: a port here, or a Unix socket."""

    port: int = 0
    socket: str = ""
    path: str = "/v1/chat/completions"
    headers: tuple[str, ...] = ()


class Answer:
    """`problem`: why it is not good, in one or two words."""

    __slots__ = (
        "began",
        "body",
        "cached",
        "first",
        "gaps",
        "last",
        "problem",
        "prompt",
        "status",
        "text",
    )

    def __init__(self) -> None:
        self.began = self.first = self.last = math.nan
        self.prompt = self.cached = self.status = self.gaps = 0
        self.problem = self.text = ""
        self.body = b""


def words(request: Request) -> tuple[str, str]:
    """The system's message and the user's: a block begins with its number."""
    system, *rest = (f"{block:06x} {FILLER}" for block in request.blocks)
    short = BLOCK * len(request.blocks) - request.prompt
    whole = " ".join(rest) if rest else "x"
    cut = whole.split(" ")
    return system, " ".join(cut[: len(cut) - short]) if 0 < short < len(cut) else whole


def chat(request: Request) -> bytes:
    system, user = words(request)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return body(messages=messages, max_tokens=request.answer, ignore_eos=True)


def body(**asked: Any) -> bytes:
    whole = {"model": "sim", "stream": True, "temperature": 0, **asked}
    return json.dumps({**whole, "stream_options": {"include_usage": True}}).encode()


class Talk(asyncio.Protocol):
    """One request on a connection, which can be used again afterwards."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.fresh()

    def fresh(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.answer = Answer()
        self.parts: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.answer.last = time.perf_counter()
        if math.isnan(self.answer.first) and CONTENT.search(data):
            self.answer.first = self.answer.last
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._end("not HTTP")

    def on_body(self, data: bytes) -> None:
        self.parts.append(data)

    def on_message_complete(self) -> None:
        self._end("")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._end("cut" if self.parts else "no answer")

    def _end(self, problem: str) -> None:
        if not self.done.done():
            self.answer.problem = problem
            self.answer.status = self.parser.get_status_code()
            self.done.set_result(None)


class Client:
    def __init__(self, target: Target) -> None:
        self.target = target
        self.idle: list[Talk] = []

    async def ask(self, sent: bytes, method: str = "POST", path: str = "") -> Answer:
        """An answer that is whole has no problem."""
        began = time.perf_counter()
        answer = Answer()
        try:
            talk = await self._talk()
            talk.fresh()
            answer = talk.answer
            head = self._head(method, path or self.target.path, len(sent))
            talk.transport.write(head + sent)
            async with asyncio.timeout(WAIT_S):
                await talk.done
            answer.body = b"".join(talk.parts)
            read(answer, answer.body)
            if talk.parser.should_keep_alive() and not talk.transport.is_closing():
                self.idle.append(talk)
            else:
                talk.transport.close()
        except OSError as error:  # asyncio's own timeout is one
            answer.problem = f"{type(error).__name__}"
        answer.began = began
        return answer

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            *self.target.headers,
            f"Content-Length: {length}",
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def _talk(self) -> Talk:
        while self.idle:
            talk = self.idle.pop()
            if not talk.transport.is_closing():
                return talk
        loop = asyncio.get_running_loop()
        if self.target.socket:
            return (await loop.create_unix_connection(Talk, self.target.socket))[1]
        return (await loop.create_connection(Talk, "127.0.0.1", self.target.port))[1]

    def close(self) -> None:
        for talk in self.idle:
            talk.transport.close()


def read(answer: Answer, text: bytes) -> None:
    """What its events say. Without the last one, and with an error in it, it is broken."""
    if answer.status != 200:
        answer.problem = answer.problem or f"status {answer.status}"
        return
    if not text.startswith(b"data: "):
        return  # no stream
    lines = text.split(b"\n\n")
    ended = finished = False
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]":
            ended = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            answer.problem = answer.problem or "error event"
            return
        for choice in event.get("choices", ()):
            answer.text += (
                (choice.get("delta") or choice).get("content") or choice.get("text") or ""
            )
            finished = finished or bool(choice.get("finish_reason"))
        if usage := event.get("usage"):
            answer.prompt = usage["prompt_tokens"]
            answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            answer.gaps = usage["completion_tokens"] - 1
    if not answer.problem and not (ended and finished):
        answer.problem = "ended early"


async def replay(target: Target, requests: Sequence[Request], speed: float) -> list[Answer]:
    """At the trace's times, whatever the answers take."""
    client = Client(target)
    begun, tasks = time.perf_counter(), []
    first_ms = requests[0].at_ms
    for request in requests:
        sent = chat(request)
        wait_s = begun + (request.at_ms - first_ms) / 1000 / speed - time.perf_counter()
        await asyncio.sleep(max(0.0, wait_s))
        tasks.append(asyncio.create_task(client.ask(sent)))
    answers = await asyncio.gather(*tasks)
    client.close()
    return answers


def problems(answers: Sequence[Answer]) -> dict[str, int]:
    return dict(Counter(each.problem for each in answers if each.problem))
