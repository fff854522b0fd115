"""What the token router adds to a request: `python -m bench.router_overhead [--rate 500]`.

One replica answers at once. Requests arrive by Poisson at the given rate, half straight to the
replica and half through the router, mixed, so that both meet the same moments of a busy machine.
Each has a prompt of 1 to 12 KB in one of 500 sessions, so blocks are hashed, looked up and stored;
some of them are streams. Prints both latencies, their difference, and the router's CPU time and
memory."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
import uvloop

from shoal.model.tokens import RoutedReplica, RoutedService, RouterWanted

TOKENS = 8  # of a stream
WARM_S = 2.0
EVENT = {"id": "x", "choices": [{"index": 0, "text": " word", "finish_reason": None}]}
USAGE = {"prompt_tokens": 3_000, "completion_tokens": TOKENS}


class Replica(asyncio.Protocol):
    """Answers each request with bytes that are there already."""

    def __init__(self) -> None:
        body = json.dumps({"choices": [{"text": " word"}], "usage": USAGE}).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
        self.whole = head % (len(body), body)
        end = {"id": "x", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
        chunks = [b"data: " + json.dumps(one).encode() for one in [*[EVENT] * TOKENS, end]]
        parts = [*(one + b"\n\n" for one in chunks), b"data: [DONE]\n\n", b""]
        framed = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in parts)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        self.stream = head + b"transfer-encoding: chunked\r\n\r\n" + framed
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]):
            self.data = b""
            self.transport.write(self.stream if b'"stream":true' in body else self.whole)


class Client(asyncio.Protocol):
    """One connection; it says when an answer is whole."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def ask(self, data: bytes) -> asyncio.Future[float]:
        self.data = b""
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.began = time.perf_counter()
        self.transport.write(data)
        return self.done

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        if not end:
            return
        assert head.startswith(b"HTTP/1.1 200"), self.data
        length = head.lower().partition(b"content-length: ")[2].split(b"\r")[0]
        if body.endswith(b"0\r\n\r\n") if not length else len(body) >= int(length):
            self.done.set_result(time.perf_counter() - self.began)


class Side:
    """Clients of one address."""

    def __init__(self, connect: object) -> None:
        self.connect = connect
        self.idle: list[Client] = []
        self.took: list[float] = []

    async def ask(self, data: bytes, counts: bool) -> None:
        client = self.idle.pop() if self.idle else (await self.connect(Client))[1]  # type: ignore[operator]
        took = await client.ask(data)
        self.idle.append(client)
        if counts:
            self.took.append(took * 1e3)

    def at(self, share: float) -> float:
        return sorted(self.took)[int(share * (len(self.took) - 1))]


def request(draw: random.Random, streams: float) -> bytes:
    session, turn = draw.randrange(500), draw.randrange(1, 12)
    prompt = "".join(f"{session} {place} " * 125 for place in range(turn))
    stream = b',"stream":true' if draw.random() < streams else b""
    body = b'{"model":"m","prompt":"%s"%s}' % (prompt.encode(), stream)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-shoal-service: chat\r\n"
    return head + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def measure(folder: Path, port: int, rate: float, seconds: float, streams: float) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_unix_connection(folder / "router-control.sock")
    replica = RoutedReplica(id="r1", address="127.0.0.1", port=port)
    service = RoutedService(name="chat", replicas=(replica,))
    writer.write(msgspec.json.encode(RouterWanted(services=(service,))) + b"\n")
    await reader.readline()
    direct = Side(lambda kind: loop.create_connection(kind, "127.0.0.1", port))
    routed = Side(lambda kind: loop.create_unix_connection(kind, str(folder / "router.sock")))
    draw, tasks, begin = random.Random(1), set[asyncio.Task[None]](), time.perf_counter()
    at = 0.0
    while at < seconds:
        at += draw.expovariate(2 * rate)
        data = request(draw, streams)
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        side = direct if draw.random() < 0.5 else routed
        task = asyncio.create_task(side.ask(data, at > WARM_S))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for name, side in (("direct", direct), ("router", routed)):
        shown = ", ".join(f"p{share * 100:g} {side.at(share):.2f}" for share in (0.5, 0.9, 0.99))
        print(f"{name}: {len(side.took)} requests, {shown} ms")
    added = ", ".join(
        f"p{share * 100:g} {routed.at(share) - direct.at(share):.2f}" for share in (0.5, 0.9, 0.99)
    )
    print(f"added: {added} ms")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rate", type=float, default=500.0, help="requests per second")
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--streams", type=float, default=0.5, help="their share")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "gateway"
        folder.mkdir(mode=0o700)
        router = subprocess.Popen([sys.executable, "-m", "shoal.router", str(folder)])
        server, port = serve()
        try:
            while not (folder / "router-control.sock").exists():
                time.sleep(0.02)
            uvloop.run(measure(folder, port, chosen.rate, chosen.seconds, chosen.streams))
            process = psutil.Process(router.pid)
            cpu, memory = process.cpu_times(), process.memory_info().rss
            share = (cpu.user + cpu.system) / chosen.seconds
            print(f"the router: {share:.2f} of a core, {memory / 2**20:.0f} MiB")
        finally:
            router.kill()
            router.wait()
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)


def serve() -> tuple[int, int]:
    """The replica, in a process of its own: its id and its port."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, int(os.read(read, 16))

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Replica, "127.0.0.1", 0)
        os.write(write, b"%d" % server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())
    os._exit(0)


if __name__ == "__main__":
    main()
