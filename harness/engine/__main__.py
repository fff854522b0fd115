"""Serve simulated engines, one at each port, in one process.

python -m harness.engine 8001 8002 --speed 10 --table '{"prompt_ms": 0.1}'

Prints a line when all of them listen; port 0 is any free one. With $PORT and no port it serves
there, as a service does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal

import msgspec
import uvloop

from harness.engine.model import LLAMA_70B, Table
from harness.engine.server import Served, listen


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.engine", description=__doc__)
    parser.add_argument("ports", nargs="*", type=int, metavar="PORT")
    parser.add_argument("--host", default=os.environ.get("HOST", "127.0.0.1"))
    parser.add_argument("--speed", type=float, default=1.0, help="times faster than the table")
    parser.add_argument("--interval", type=int, default=1, help="tokens in an event of a stream")
    parser.add_argument("--model", default=os.environ.get("SHOAL_SERVICE", "sim"))
    parser.add_argument("--table", default="{}", help="JSON: what differs from the default")
    parser.add_argument("--llama-70b", action="store_true", help="that table as the default")
    parser.add_argument("--context", type=int, default=1 << 20, help="tokens of a request")
    parser.add_argument("--adapters", type=int, default=0, help="loaded at a time")
    asked = parser.parse_args()
    base = msgspec.to_builtins(LLAMA_70B if asked.llama_70b else Table())
    table = msgspec.convert(base | msgspec.json.decode(asked.table), Table)
    ports = asked.ports or [int(os.environ.get("PORT", "8000"))]

    async def serve() -> None:
        servers = []
        for port in ports:
            served = Served(
                table,
                model=asked.model,
                speed=asked.speed,
                interval=asked.interval,
                context_tokens=asked.context,
                adapters_max=asked.adapters,
            )
            servers.append(await listen(served, port, asked.host))
        found = [str(each.sockets[0].getsockname()[1]) for each in servers]
        print(f"listens at {' '.join(found)}", flush=True)
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()

    uvloop.run(serve())


if __name__ == "__main__":
    main()
