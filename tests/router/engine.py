"""A small engine: `python -m tests.router.engine NAME`, which prints its port. The next word of a
text follows from all of the text before it, so a word that is doubled or missing changes all that
follow. `/control` makes it wait, fail or speak nonsense."""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from typing import Any

WORDS = [" red", " green", " blue", "\n", ",", "ink", " a b", "é", " 東京", "."]
TEMPLATE_END = "\n<assistant>\n"


def next_word(text: str) -> str:
    return WORDS[zlib.crc32(text.encode()) % len(WORDS)]


def rendered(body: dict[str, Any]) -> str:
    if "messages" not in body:
        return str(body["prompt"])
    text = ""
    for message in body["messages"]:
        text += f"\n<{message['role']}>\n{message['content']}"
    if body.get("continue_final_message"):
        # As most templates do.
        assert not body["add_generation_prompt"]
        return text.rstrip()
    return text + TEMPLATE_END


def written(text: str, count: int) -> list[str]:
    """What an engine that nothing disturbs says."""
    words: list[str] = []
    while len(words) < count:
        words.append(next_word(text))
        text += words[-1]
    return words


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[dict[str, Any]] = []
        self.in_flight = 0
        self.most = 0
        self.cut = 0  # requests whose client hung up
        self.wait_at = -1  # words after which a stream waits
        self.go = asyncio.Event()
        self.say: dict[str, Any] = {}
        self.prompts: list[str] = []
        self.adapters: list[str] = []
        self.loads: list[str] = []

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode("latin-1").split("\r\n")[:-2]
                method, target, _ = first.split(" ")
                headers = [tuple(line.split(": ", 1)) for line in lines]
                fields = {name.lower(): value for name, value in headers}
                if fields.get("upgrade") == "websocket":
                    await self.echo(reader, writer)
                    return
                body = await read_body(reader, fields)
                task = asyncio.ensure_future(self.answer(method, target, headers, body, writer))
                gone = asyncio.ensure_future(hung_up(reader))
                await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
                gone.cancel()
                if not task.done():
                    self.cut += 1
                    task.cancel()
                    break
                try:
                    await task
                except ConnectionError:  # it was in the middle of a word
                    self.cut += 1
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def echo(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\n")
        writer.write(b"connection: upgrade\r\nupgrade: websocket\r\n\r\nhello")
        while data := await reader.read(1_000):
            writer.write(data)

    async def answer(
        self,
        method: str,
        target: str,
        headers: list[Any],
        body: bytes,
        writer: asyncio.StreamWriter,
    ) -> None:
        if target == "/control":
            self.control(json.loads(body))
            return await send(writer, 200, self.state())
        self.seen.append(
            {"method": method, "target": target, "headers": headers, "size": len(body)}
        )
        if "garbage" in self.say:
            writer.write(b"\x00\x01 no HTTP\r\n\r\n")
            return writer.close()
        if "endless" in self.say:
            return await endless(self.say["endless"], writer)
        if "status" in self.say:
            return await send(writer, self.say["status"], {"error": {"message": "asked to"}})
        if target == "/v1/models":
            models = [{"id": "real/model", "owned_by": self.say.get("maker", "vllm")}]
            return await send(writer, 200, {"object": "list", "data": models})
        if target.endswith("_lora_adapter"):
            return await self.adapter(target, json.loads(body), writer)
        if target in ("/v1/completions", "/v1/chat/completions"):
            self.in_flight += 1
            self.most = max(self.most, self.in_flight)
            try:
                return await self.complete(json.loads(body), writer)
            finally:
                self.in_flight -= 1
        if target == "/size":
            return await send(writer, 200, {"size": len(body), "headers": headers})
        if target == "/until-close":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nto the end")
            await writer.drain()
            return writer.close()
        return await send(writer, 404, {"error": {"message": "no such path"}})

    def control(self, wish: dict[str, Any]) -> None:
        self.say = wish.get("say", self.say)
        if "wait_at" in wish:
            self.wait_at = wish["wait_at"]
            self.go.clear()
        if wish.get("go"):
            self.wait_at = -1
            self.go.set()

    def state(self) -> dict[str, Any]:
        return {
            "seen": self.seen,
            "cut": self.cut,
            "in_flight": self.in_flight,
            "most": self.most,
            "loads": self.loads,
            "adapters": self.adapters,
        }

    async def adapter(
        self, target: str, body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        name = body["lora_name"]
        self.loads.append(f"{target.rpartition('/')[2].partition('_')[0]} {name}")
        if "unload" in target:
            self.adapters.remove(name)
        else:
            assert body["lora_path"]
            self.adapters.append(name)
        await send(writer, 200, {})

    async def complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        known = ["real/model", *self.adapters]
        if body["model"] not in known:
            return await send(writer, 404, {"error": {"message": f"no model {body['model']}"}})
        text = rendered(body)
        cached = max((common(text, one) for one in self.prompts), default=0) // 4
        words = written(text, body.get("max_tokens", 16))
        usage = {
            "prompt_tokens": max(1, len(text) // 4),
            "completion_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        usage = self.say.get("usage", usage)
        if not body.get("stream"):
            if self.wait_at >= 0:
                await self.go.wait()
            said = "".join(words)
            choice = {"index": 0, "finish_reason": "length"}
            choice |= {"message": {"content": said}} if "messages" in body else {"text": said}
            self.prompts.append(text + said)
            return await send(writer, 200, {"id": "x", "choices": [choice], "usage": usage})
        return await self.stream(body, text, words, usage, writer)

    async def stream(
        self,
        body: dict[str, Any],
        text: str,
        words: list[str],
        usage: dict[str, Any],
        writer: asyncio.StreamWriter,
    ) -> None:
        chat = "messages" in body
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        base = {"id": f"of-{self.name}-{len(self.seen)}", "created": len(self.seen), "model": "m"}
        if chat:
            delta = {"role": "assistant", "content": ""}
            chunk(writer, {**base, "choices": [{"index": 0, "delta": delta}]})
        for place, word in enumerate(words):
            if place == self.wait_at:
                await writer.drain()
                await self.go.wait()
            said: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
            if "tools" in self.say:
                said = {"delta": {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}}
            chunk(writer, {**base, "choices": [{"index": 0, "finish_reason": None, **said}]})
            await writer.drain()
            if place == self.say.get("abort_at"):
                end = {"index": 0, "finish_reason": "abort", **({"delta": {}} if chat else {})}
                chunk(writer, {**base, "choices": [end]}, end=True)
                return
            if place == self.say.get("error_at"):
                chunk(writer, {"error": {"message": "oh", "code": 500}}, end=True)
                return
        end = {"index": 0, "finish_reason": "length", **({"delta": {}} if chat else {"text": ""})}
        chunk(writer, {**base, "choices": [end]})
        if (body.get("stream_options") or {}).get("include_usage"):
            chunk(writer, {**base, "choices": [], "usage": usage})
        self.prompts.append(text + "".join(words))
        part(writer, b"data: [DONE]\n\n")
        part(writer, b"")
        await writer.drain()


def common(one: str, other: str) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


async def hung_up(reader: asyncio.StreamReader) -> None:
    """Returns when the other side has closed; requests do not come before the answer."""
    while not reader.at_eof():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def read_body(reader: asyncio.StreamReader, fields: dict[str, str]) -> bytes:
    if "content-length" in fields:
        return await reader.readexactly(int(fields["content-length"]))
    body = b""
    while "transfer-encoding" in fields and (size := int(await reader.readline(), 16)):
        body += (await reader.readexactly(size + 2))[:-2]
    if "transfer-encoding" in fields:
        await reader.readline()
    return body


ENDLESS = {
    "head": (b"HTTP/1.1 200 OK\r\nx-long: ", b"x" * 10_000),
    "1xx": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 400),
    "trailer": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nx-long: ",
        b"x" * 10_000,
    ),
}


async def endless(kind: str, writer: asyncio.StreamWriter) -> None:
    head, more = ENDLESS[kind]
    writer.write(head)
    while True:
        writer.write(more)
        await writer.drain()


def part(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def chunk(writer: asyncio.StreamWriter, content: dict[str, Any], end: bool = False) -> None:
    part(writer, b"data: " + json.dumps(content).encode() + b"\n\n")
    if end:
        part(writer, b"")


async def send(writer: asyncio.StreamWriter, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


async def main() -> None:
    server = await asyncio.start_server(Engine(sys.argv[1]).connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
