"""A simulated engine as an HTTP server: OpenAI's routes, vLLM's figures, on the real clock."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from typing import Any, cast

import httptools

from harness.engine import wire
from harness.engine.model import Done, Engine, Sequence, Table
from harness.engine.text import answer, hashes

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large"}


class Talk:
    """A request and its answer, on its connection."""

    __slots__ = ("asked", "client", "finish", "sequence", "told", "words")

    def __init__(self, asked: wire.Asked, client: Client, words: list[str], finish: str) -> None:
        self.asked, self.client, self.words, self.finish = asked, client, words, finish
        self.told = 0  # words
        self.sequence: Sequence


class Served:
    """An engine with its clock. `speed`: how many times faster than the table says; `interval`:
    a stream gets its tokens in groups of so many (vLLM's --stream-interval)."""

    def __init__(
        self,
        table: Table,
        *,
        model: str = "sim",
        speed: float = 1.0,
        interval: int = 1,
        context_tokens: int = 1 << 20,
        adapters_max: int = 0,
    ) -> None:
        self.table, self.model, self.speed, self.interval = table, model, speed, interval
        self.context_tokens, self.adapters_max = context_tokens, adapters_max
        self.engine = Engine(table)
        self.talks: dict[int, Talk] = {}
        self.adapters: dict[str, None] = {}
        self.loads = 0  # of adapters
        self.done = 0
        self._numbers = itertools.count(1)
        self._begun = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def now_ms(self) -> float:
        return (time.monotonic() - self._begun) * 1000 * self.speed

    def ask(self, asked: wire.Asked, client: Client) -> Talk:
        adapter = asked.model if asked.model in self.adapters else ""
        if asked.model not in ("", self.model) and not adapter:
            raise wire.BadRequest(f"The model `{asked.model}` does not exist.", 404)
        prompt = asked.prompt.split()
        if len(prompt) + asked.most > self.context_tokens:
            raise wire.BadRequest(
                f"{len(prompt)} tokens and max_tokens {asked.most} exceed {self.context_tokens}"
            )
        words, ended = answer(asked.prompt, asked.most, asked.ends)
        asked.model = asked.model or self.model
        talk = Talk(asked, client, words, "stop" if ended else "length")
        everything = prompt + [each.strip() for each in words]
        found = hashes(everything, self.table.block_tokens, adapter)
        talk.sequence = Sequence(next(self._numbers), found, len(prompt), len(words))
        self.talks[talk.sequence.id] = talk
        self.engine.submit(talk.sequence, self.now_ms())
        self._wake()
        return talk

    def leave(self, talk: Talk) -> None:
        if self.talks.pop(talk.sequence.id, None) is not None:
            self.engine.cancel(talk.sequence)

    def _wake(self) -> None:
        if self.engine.working:
            end_ms = self.engine.cut(self.now_ms())
            if end_ms is not None:
                self._until(end_ms)
        else:
            self._begin(self.now_ms())

    def _begin(self, now_ms: float) -> None:
        end_ms = self.engine.begin(now_ms, self.interval)
        if end_ms is not None:
            self._until(end_ms)

    def _until(self, end_ms: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = max(0.0, end_ms - self.now_ms()) / 1000 / self.speed
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._run_ends, end_ms)

    def _run_ends(self, end_ms: float) -> None:
        self._timer = None
        done = self.engine.finish()
        self._tell(done)
        # A step begins when the one before has ended, also if this process was late to see it.
        self._begin(end_ms)

    def _tell(self, done: Done) -> None:
        for sequence in done.first:
            talk = self.talks.get(sequence.id)
            if talk is not None and talk.asked.stream:
                beginning = talk.asked.piece(None) if talk.asked.chat else b""
                talk.client.begin_stream()
                talk.client.stream(beginning + self._grown(talk, 1))
        for sequence in self.engine.growing.values():
            talk = self.talks.get(sequence.id)
            count = 1 + self.engine.steps - sequence.since
            if talk is not None and talk.asked.stream and count - talk.told >= self.interval:
                talk.client.stream(self._grown(talk, count))
        for sequence in done.ended:
            talk = self.talks.pop(sequence.id, None)
            if talk is not None:
                self.done += 1
                self._end(talk)

    def _grown(self, talk: Talk, count: int) -> bytes:
        text = "".join(talk.words[talk.told : count])
        talk.told = count
        return talk.asked.piece(text) if text else b""

    def _end(self, talk: Talk) -> None:
        asked, sequence = talk.asked, talk.sequence
        usage = wire.usage(sequence.prompt, sequence.cached, len(talk.words))
        if not asked.stream:
            talk.client.answer(200, asked.whole("".join(talk.words), talk.finish, usage))
            return
        rest = self._grown(talk, len(talk.words)) + asked.piece(None, talk.finish)
        if asked.usage:
            rest += asked.last(usage)
        talk.client.stream(rest + wire.DONE)
        talk.client.end_stream()

    def models(self) -> bytes:
        names = [self.model, *self.adapters]
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "sim"}
            | ({"parent": self.model} if name != self.model else {})
            for name in names
        ]
        return json.dumps({"object": "list", "data": data}).encode()

    def load(self, body: bytes) -> bytes:
        """Loading an adapter stops everything for as long as the table says."""
        name = str(_object(body).get("lora_name") or "")
        if not name or not _object(body).get("lora_path"):
            raise wire.BadRequest("Both 'lora_name' and 'lora_path' must be provided.")
        if name in self.adapters:
            raise wire.BadRequest(f"The lora adapter '{name}' has already been loaded.")
        if len(self.adapters) >= self.adapters_max:
            raise wire.BadRequest(f"{self.adapters_max} adapters are loaded already")
        self.adapters[name] = None
        self.loads += 1
        return b"Success: LoRA adapter added."

    def unload(self, body: bytes) -> bytes:
        name = str(_object(body).get("lora_name") or "")
        if name not in self.adapters:
            raise wire.BadRequest(f"The lora adapter '{name}' cannot be found.", 404)
        del self.adapters[name]
        return b"Success: LoRA adapter removed."

    def metrics(self) -> bytes:
        engine, label = self.engine, f'{{model_name="{self.model}"}}'
        values = {
            "num_requests_running": ("gauge", engine.running),
            "num_requests_waiting": ("gauge", len(engine.waiting)),
            "kv_cache_usage_perc": ("gauge", engine.blocks.in_use / engine.blocks.count),
            "prefix_cache_queries_total": ("counter", engine.prompt_tokens),
            "prefix_cache_hits_total": ("counter", engine.hit_tokens),
            "prompt_tokens_total": ("counter", engine.prompt_tokens),
            "generation_tokens_total": ("counter", engine.answer_tokens),
            "request_success_total": ("counter", self.done),
        }
        lines = []
        for name, (kind, value) in values.items():
            lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{label} {value:g}"]
        lines.append(f"sim:busy_ms_total{label} {engine.busy_ms:.3f}")
        return ("\n".join(lines) + "\n").encode()


def _object(body: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(body)
        if isinstance(found, dict):
            return found
    raise wire.BadRequest("the body is not an object")


class Client(asyncio.Protocol):
    """A connection; one request at a time."""

    transport: asyncio.Transport

    def __init__(self, served: Served) -> None:
        self.served = served
        self.parser = httptools.HttpRequestParser(self)
        self.path = b""
        self.body: list[bytes] = []
        self.talk: Talk | None = None
        self.count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self.talk is not None:
            self.served.leave(self.talk)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    def on_message_begin(self) -> None:
        self.path, self.body = b"", []

    def on_url(self, url: bytes) -> None:
        self.path += url

    def on_header(self, name: bytes, value: bytes) -> None:  # noqa: ARG002
        if name.lower() == b"expect":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        method, path = self.parser.get_method(), self.path.partition(b"?")[0].decode()
        try:
            self._route(method, path, b"".join(self.body))
        except wire.BadRequest as error:
            self.answer(error.status, wire.error(str(error), error.status))

    def _route(self, method: bytes, path: str, body: bytes) -> None:
        served = self.served
        if method == b"POST" and path in ("/v1/completions", "/v1/chat/completions"):
            self.count += 1
            key = f"{'chatcmpl' if 'chat' in path else 'cmpl'}-{id(self):x}-{self.count}"
            self.talk = served.ask(wire.Asked(body, "chat" in path, key), self)
        elif method == b"POST" and path == "/v1/load_lora_adapter":
            done = served.load(body)
            wait_s = served.table.adapter_ms / 1000 / served.speed
            asyncio.get_running_loop().call_later(wait_s, self.answer, 200, done, "text/plain")
        elif method == b"POST" and path == "/v1/unload_lora_adapter":
            self.answer(200, served.unload(body), "text/plain")
        elif method == b"GET" and path == "/v1/models":
            self.answer(200, served.models())
        elif method == b"GET" and path == "/metrics":
            self.answer(200, served.metrics(), "text/plain; version=0.0.4")
        elif path in ("/health", "/ping", "/version"):
            self.answer(200, b'{"status":"ok"}')
        else:
            raise wire.BadRequest("Not Found", 404)

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.talk = None
        if not self.transport.is_closing():
            self.transport.write(
                f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )

    def begin_stream(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    def stream(self, data: bytes) -> None:
        if data and not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.talk = None
        if not self.transport.is_closing():
            self.transport.write(b"0\r\n\r\n")


async def listen(served: Served, port: int, host: str = "127.0.0.1") -> asyncio.Server:
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Client(served), host, port, backlog=1024)
