"""Mooncake's four ways to choose a prefill instance (Figure 5 of FAST'25), played again.

python -m bench.tokens_published [--instances 8 10] [--slower 1.0]

An instance reads one prompt after the other, as Llama-3-70B's shape on eight A800 does at half of
the peak (`LLAMA_70B`), and answers one token; other instances decode. It keeps 3 M tokens of
blocks, as in Figure 10. How many of the 16 nodes of Figure 5 read prompts was not published;
Figure 10 has ten, so that is the one to compare, and others are played beside it.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from collections.abc import Sequence
from statistics import fmean

import msgspec
from harness.engine.model import LLAMA_70B

from bench.figures import table
from bench.token_traces import BLOCK, Request, TraceError, read

PUBLISHED_S = {"random": 19.65, "least load": 5.27, "local cache": 3.58, "global cache": 3.07}
CACHE_BLOCKS = 3_000_000 // BLOCK
# One 100 Gbit/s card of an instance, and 320 KB of cache a token.
MOVE_MS_PER_BLOCK = BLOCK * 320e3 / 12.5e9 * 1e3


class Instance:
    def __init__(self) -> None:
        self.free_ms = 0.0  # when it has read all that it was given
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def cost(self, request: Request, slower: float) -> tuple[float, int]:
        """How long it reads the prompt, and the tokens that it has cached."""
        count = 0
        for block in request.blocks:
            if block not in self.blocks:
                break
            count += 1
        match = min(count * BLOCK, request.prompt - 1)
        return read_ms(request.prompt, match, slower), match

    def keep(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > CACHE_BLOCKS:
            self.blocks.popitem(last=False)


def read_ms(prompt: int, cached: int, slower: float) -> float:
    pairs = (prompt**2 - cached**2) / 2
    new_ms = LLAMA_70B.prompt_ms * (prompt - cached) + LLAMA_70B.attention_ms * pairs / 1e6
    return LLAMA_70B.step_ms + slower * new_ms


def _moved(request: Request, match: int, most: int, slower: float) -> tuple[float, int]:
    """The blocks that another instance has come from there."""
    moved_ms = (most - match) / BLOCK * MOVE_MS_PER_BLOCK
    return moved_ms + read_ms(request.prompt, most, slower), most


def play(requests: Sequence[Request], way: str, count: int, slower: float) -> tuple[float, float]:
    """The mean time to the first token in seconds, and the share of tokens that were cached."""
    rng, fleet = random.Random(way), [Instance() for _ in range(count)]
    waits_ms, cached = [], 0
    for request in requests:
        queues_ms = [max(0.0, each.free_ms - request.at_ms) for each in fleet]
        if way == "random":
            at = rng.randrange(count)
            own_ms, match = fleet[at].cost(request, slower)
        elif way == "least load":
            at = min(range(count), key=queues_ms.__getitem__)
            own_ms, match = fleet[at].cost(request, slower)
        else:
            costs = [each.cost(request, slower) for each in fleet]
            if way == "global cache":
                most = max(match for _, match in costs)
                costs = [min(each, _moved(request, each[1], most, slower)) for each in costs]
            at = min(range(count), key=lambda i: queues_ms[i] + costs[i][0])
            own_ms, match = costs[at]
        fleet[at].free_ms = request.at_ms + queues_ms[at] + own_ms
        fleet[at].keep(request.blocks)
        waits_ms.append(queues_ms[at] + own_ms)
        cached += match
    return fmean(waits_ms) / 1000, cached / sum(each.prompt for each in requests)


def _row(name: str, ttfts_s: dict[str, float]) -> tuple[str, ...]:
    base = ttfts_s["least load"]
    return (name, *(f"{each:.2f}  {each / base:.2f}" for each in ttfts_s.values()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.tokens_published", description=__doc__)
    parser.add_argument("--instances", type=int, nargs="*", default=[8, 9, 10, 11, 12])
    parser.add_argument("--slower", type=float, default=1.0, help="times as long to read a prompt")
    asked = parser.parse_args(argv)
    try:
        requests = read("mooncake")
    except TraceError as error:
        print(f"tokens_published: {error}")
        return 2
    found = {
        count: {way: play(requests, way, count, asked.slower) for way in PUBLISHED_S}
        for count in asked.instances
    }
    rows = [
        _row(f"{count} instances", {way: ttft_s for way, (ttft_s, _) in each.items()})
        for count, each in found.items()
    ]
    rows.append(_row("published", PUBLISHED_S))
    print(table(("mean s, and / least load", *PUBLISHED_S), rows))
    print(msgspec.json.encode({str(count): each for count, each in found.items()}).decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
