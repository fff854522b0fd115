"""A replica for the benchmark: `python gateway_replica.py PORT CONCURRENCY MEAN_MS SLOWER SEED
[STATUS]`.

Handles CONCURRENCY requests at a time, each for a lognormal time; the rest wait in order. By its
status, a client sees which replica has answered.
"""

from __future__ import annotations

import asyncio
import collections
import math
import random
import sys
from typing import cast

import uvloop

SIGMA = 0.668  # a mean of 50 ms with a median of 40
ANSWER = b"HTTP/1.1 %d OK\r\ncontent-length: 2\r\ncontent-type: text/plain\r\n\r\nok"


class Work:
    """The slots of one replica."""

    def __init__(self, slots: int, mean_ms: float, slower: float, seed: int) -> None:
        self._free = slots
        self._waiting: collections.deque[Connection] = collections.deque()
        self._random = random.Random(seed)
        self._median_s = mean_ms * slower / math.exp(SIGMA**2 / 2) / 1000

    def begin(self, connection: Connection) -> None:
        if not self._free:
            self._waiting.append(connection)
            return
        self._free -= 1
        seconds = self._median_s * math.exp(self._random.gauss(0, SIGMA))
        asyncio.get_running_loop().call_later(seconds, self._end, connection)

    def _end(self, connection: Connection) -> None:
        connection.answer()
        self._free += 1
        if self._waiting:
            self.begin(self._waiting.popleft())


class Connection(asyncio.Protocol):
    def __init__(self, work: Work, status: int) -> None:
        self._work = work
        self._status = status
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has its own class

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, mark, body = self._data.partition(b"\r\n\r\n")
        if not mark:
            return
        found = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if len(body) >= int(found or 0):
            self._data = b""
            self._work.begin(self)

    def answer(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(ANSWER % self._status)


async def main() -> None:
    port, slots, mean_ms, slower, seed = sys.argv[1:6]
    status = int(sys.argv[6]) if len(sys.argv) > 6 else 200
    work = Work(int(slots), float(mean_ms), float(slower), int(seed))
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(work, status), "127.0.0.1", int(port)
    )
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
