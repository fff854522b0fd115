"""A small HTTP server that behaves as badly as it is asked to: `python -m ... PORT NAME`."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import signal
import sys
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qsl, urlsplit

WEBSOCKET_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Request:
    def __init__(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.path = urlsplit(target).path
        self.query = dict(parse_qsl(urlsplit(target).query))
        self.headers = headers
        self.body = body

    def number(self, name: str, default: int) -> int:
        return int(self.query.get(name, default))


class Replica:
    """Counts what it is working on, so that a test can see a limit kept."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slow_ms = 0
        self.broken = False
        self.in_flight = 0
        self.most = 0
        self.seen = 0
        self.steps = asyncio.Semaphore(0)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await read(reader):
                if not await self.answer(request, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection is kept."""
        if request.path == "/control":
            self.slow_ms = request.number("slow_ms", self.slow_ms)
            self.broken = bool(request.number("broken", self.broken))
            if request.number("step", 0):
                self.steps.release()
            return await send(writer, f"{self.most} {self.seen}".encode())
        self.in_flight += 1
        self.seen += 1
        self.most = max(self.most, self.in_flight)
        try:
            if self.broken:
                return await send(writer, b"broken", status=500)
            await asyncio.sleep(self.slow_ms / 1000)
            method = METHODS.get(request.path, Replica.whoami)
            return await method(self, request, reader, writer)
        finally:
            self.in_flight -= 1

    async def whoami(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        await asyncio.sleep(request.number("ms", 0) / 1000)
        return await send(writer, self.name.encode())

    async def metrics(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Named `engine`, it shows a queue as an inference engine does."""
        if self.name != "engine":
            return await self.whoami(request, reader, writer)
        return await send(writer, b"vllm:num_requests_running 4\nvllm:num_requests_waiting 4\n")

    async def echo(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        lines = [f"{request.method} {request.path}"]
        lines += [f"{key}: {value}" for key, value in request.headers.items()]
        return await send(writer, "\n".join(lines).encode())

    async def cookies(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Two of them, as two headers."""
        lines = f"set-cookie: {request.query['set']}\r\nset-cookie: own=kept\r\n"
        return await send(writer, b"", extra=lines.encode())

    async def status(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        return await send(writer, self.name.encode(), status=request.number("code", 500))

    async def stream(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Server-sent events, one chunk each."""
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for number in range(request.number("n", 5)):
            event = f"data: {self.name} {number}\n\n".encode()
            writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await writer.drain()
            await asyncio.sleep(request.number("every_ms", 10) / 1000)
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def stepped(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """A chunk for each step that is asked for, without end."""
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            await self.steps.acquire()
            writer.write(b"6\r\ntoken \r\n")
            await writer.drain()

    async def bulk(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        return await send(writer, b"x" * request.number("bytes", 1 << 20))

    async def hang(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        await reader.read()  # until the other side gives up
        return False

    async def close(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        return False

    async def half(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf")
        await writer.drain()
        return False

    async def huge(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        return await send(writer, b"huge", extra=b"x-huge: " + b"h" * 200_000 + b"\r\n")

    async def websocket(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        key = request.headers["sec-websocket-key"].encode()
        accept = base64.b64encode(hashlib.sha1(key + WEBSOCKET_MAGIC).digest())
        writer.write(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-accept: " + accept + b"\r\n\r\n"
        )
        while data := await reader.read(4096):  # frames go back as they came
            writer.write(data)
            await writer.drain()
        return False


Method = Callable[[Replica, Request, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]
METHODS: dict[str, Method] = {
    "/metrics": Replica.metrics,
    "/echo": Replica.echo,
    "/cookies": Replica.cookies,
    "/status": Replica.status,
    "/stream": Replica.stream,
    "/stepped": Replica.stepped,
    "/bulk": Replica.bulk,
    "/hang": Replica.hang,
    "/close": Replica.close,
    "/half": Replica.half,
    "/huge": Replica.huge,
    "/websocket": Replica.websocket,
}


async def read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {key.lower(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    return Request(method, target, headers, body)


async def send(
    writer: asyncio.StreamWriter, body: bytes, *, status: int = 200, extra: bytes = b""
) -> bool:
    writer.write(
        f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n".encode() + extra + b"\r\n" + body
    )
    await writer.drain()
    return True


async def main() -> None:
    replica = Replica(sys.argv[2])
    server = await asyncio.start_server(
        replica.connection, "127.0.0.1", int(sys.argv[1]), limit=1 << 20
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sys.exit, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
