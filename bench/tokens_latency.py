"""What the router adds to a request: directly, through HAProxy, and through HAProxy and the router.

python -m bench.tokens_latency [--rate 500] [--seconds 10] [--rounds 3]

The replica answers at once with one token. The three ways take turns, one round after the other;
requests come at their times, whatever the answers take. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator, Sequence

from harness.engine.running import engines

from bench.figures import machine, percentile, table
from bench.token_load import Client, Target
from bench.token_peers import shoal
from shoal.model.service import Routing

ASKED = {
    "model": "sim",
    "messages": [{"role": "user", "content": "word " * 200}],
    "max_tokens": 1,
    "stream": True,
}
TABLE = '{"step_ms": 0.01, "prompt_ms": 0, "sequence_ms": 0, "context_ms": 0}'


@contextlib.contextmanager
def direct(ports: Sequence[int]) -> Iterator[Target]:
    yield Target(port=ports[0])


async def measure(target: Target, rate: float, seconds: float) -> list[float]:
    """Milliseconds until the answer is whole."""
    client, rng, sent = Client(target), random.Random(0), json.dumps(ASKED).encode()
    await asyncio.gather(*(client.ask(sent) for _ in range(32)))  # connections
    begun, at_s, tasks = time.perf_counter(), 0.0, []
    while at_s < seconds:
        at_s += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, begun + at_s - time.perf_counter()))
        tasks.append(asyncio.create_task(client.ask(sent)))
    answers = await asyncio.gather(*tasks)
    client.close()
    wrong = [each.problem for each in answers if each.problem]
    assert not wrong, f"{len(wrong)} requests failed: {wrong[0]}"
    return [1000 * (each.last - each.began) for each in answers]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.tokens_latency", description=__doc__)
    parser.add_argument("--rate", type=float, default=500)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(argv)
    print(machine())
    found: dict[str, list[float]] = {}
    with engines("--table", TABLE, count=4) as ports, contextlib.ExitStack() as open_:
        ways = {
            "direct": open_.enter_context(direct(ports)),
            "HAProxy": open_.enter_context(shoal(Routing.LEAST_LOADED, ports)),
            "HAProxy and router": open_.enter_context(shoal(Routing.CACHE, ports)),
        }
        for _ in range(asked.rounds):
            for name, target in ways.items():
                times = asyncio.run(measure(target, asked.rate, asked.seconds / asked.rounds))
                found.setdefault(name, []).extend(times)
    shown = {
        name: {f"p{p}_ms": round(percentile(times, p), 2) for p in (50, 90, 99)}
        for name, times in found.items()
    }
    rows = [(name, len(found[name]), *each.values()) for name, each in shown.items()]
    print(table(("", "requests", "p50 ms", "p90", "p99"), rows))
    print(json.dumps(shown))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
