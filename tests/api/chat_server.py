"""A replica that speaks as OpenAI's servers do: `python -m ... PORT NAME`. It sends a word of its
answer for each word of the last message, and `break`, `wrong` and `wait` do as they say."""

from __future__ import annotations

import asyncio
import json

from tests.gateway.replica import METHODS, Replica, Request, main, send

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def models(
    self: Replica, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    found = {"object": "list", "data": [{"id": self.name, "object": "model"}]}
    return await send(writer, json.dumps(found).encode())


async def chat(
    self: Replica, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    said = json.loads(request.body)["messages"]
    writer.write(HEAD)
    for word in said[-1]["content"].split():
        if word == "break":
            return False
        if word == "wait":
            await reader.read()  # until the client leaves
            return False
        piece: object = {"choices": [{"delta": {"content": f"{word.upper()} "}}]}
        if word == "wrong":
            piece = {"error": {"message": "the engine is out of memory"}}
        _chunk(writer, f"data: {json.dumps(piece)}\n\n".encode())
        await writer.drain()
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


METHODS["/v1/models"] = models
METHODS["/v1/chat/completions"] = chat

if __name__ == "__main__":
    asyncio.run(main())
