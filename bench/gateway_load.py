"""An open-loop client: requests begin on schedule, whatever happened to earlier ones.

`python gateway_load.py PORT PATH RATE_PER_S SECONDS WARM_UP_S METHOD SEED` prints a JSON object.
Latency counts from when a request was due, so a stall shows in every request that it delayed.
"""

from __future__ import annotations

import asyncio
import collections
import random
import sys
import time
from typing import cast

import msgspec
import uvloop

ANSWER_TIMEOUT_S = 30.0


class Sample(msgspec.Struct, frozen=True):
    """`begun_s` is monotonic time; a failure has status 0, or 500 and above."""

    begun_s: float
    latency_s: float
    status: int


class Connection(asyncio.Protocol):
    """One request at a time; answers need a content-length."""

    def __init__(self) -> None:
        self._data = b""
        self._answer: asyncio.Future[int] | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has its own class

    def ask(self, request: bytes) -> asyncio.Future[int]:
        assert self.transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, mark, body = self._data.partition(b"\r\n\r\n")
        if not mark:
            return
        found = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if len(body) >= int(found or 0):
            self._data = b""
            self._done(int(head.split(b" ", 2)[1]))

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self.transport = None
        self._done(0)

    def _done(self, status: int) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(status)


class Load:
    def __init__(self, port: int, path: str, method: str) -> None:
        body = b'{"messages":[]}' if method == "POST" else b""
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\n{length}\r\n"
        self._request = head.encode() + body
        self._port = port
        self._idle: collections.deque[Connection] = collections.deque()
        self.samples: list[Sample] = []

    async def one(self, due_s: float) -> None:
        try:
            status = await asyncio.wait_for(self._ask(), ANSWER_TIMEOUT_S)
        except (OSError, TimeoutError):
            status = 0
        self.samples.append(Sample(due_s, time.monotonic() - due_s, status))

    async def _ask(self) -> int:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None:
                break
        else:
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, "127.0.0.1", self._port
            )
        status = await connection.ask(self._request)
        if status and connection.transport is not None:
            self._idle.append(connection)
        return status


async def main() -> None:
    port, path, rate, seconds, warm_up, method, seed = sys.argv[1:8]
    load = Load(int(port), path, method)
    chance = random.Random(int(seed))
    tasks: set[asyncio.Task[None]] = set()
    start = due = time.monotonic()
    while due - start < float(warm_up) + float(seconds):
        pause = due - time.monotonic()
        if pause > 0:
            await asyncio.sleep(pause)
        task = asyncio.create_task(load.one(due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due += chance.expovariate(float(rate))
    await asyncio.gather(*tasks)
    counted = [s for s in load.samples if s.begun_s >= start + float(warm_up)]
    sys.stdout.buffer.write(msgspec.json.encode(counted))


if __name__ == "__main__":
    uvloop.run(main())
