"""Routers for language models on the same requests and the same simulated engines.

    python -m bench.tokens                                  virtual time, all traces
    python -m bench.tokens --trace mooncake --engines 8 10 12 16
    python -m bench.tokens --http --trace mooncake --seconds 300 --peers /tmp/peers/bin/python

On virtual time `cache` is the real code of `shoal.router`; `round-robin`, `least-loaded`, `p2c` and
`prefix` follow the rules of HAProxy, and two follow the published rules of others. Over HTTP all
are real processes: HAProxy as Shoal configures it, our router, and `sglang-router` and
`vllm-router` out of the environment that `--peers` names (pip install sglang-router vllm-router).
An engine is `harness.engine` with the table LLAMA_70B. The last line is one JSON object
{trace: {router: figures}}.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from harness.engine.model import LLAMA_70B
from harness.engine.running import engines

from bench.figures import machine, ratio, table
from bench.token_load import Answer, problems, replay
from bench.token_peers import Start, available
from bench.token_policies import POLICIES, Policy
from bench.token_router import Cache
from bench.token_traces import TRACES, Request, TraceError, read
from bench.tokens_virtual import Answered, Goal, Outcome, outcome, play

# So that reading all prompts without any cache takes half to all of the engines' time.
ENGINES = {
    "mooncake": 8,
    "azure-code": 4,
    "azure-conv": 3,
    "servegen": 10,
    "hot": 8,
    "decode": 8,
}
BASE, OURS = "least-loaded", "cache"
CHOICES: dict[str, Callable[[int], Policy]] = {**POLICIES, OURS: Cache}
HEADER = ("", "hit", "TTFT mean", "p50", "p99", "/ least", "ITL", "p99", "good", "busiest")
HTTP_TABLE = msgspec.structs.replace(
    LLAMA_70B, block_tokens=16, blocks=LLAMA_70B.blocks * LLAMA_70B.block_tokens // 16
)
STREAM_TOKENS = 8  # in an event, as vLLM's --stream-interval

Found = dict[str, Outcome]


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    print(machine())
    found: dict[str, Found] = {}
    try:
        for name in asked.trace:
            requests = _part(read(name), asked.seconds)
            for count in asked.engines or [ENGINES[name]]:
                title = f"{name}, {count} engines"
                run = _http if asked.http else _virtual
                found[title] = run(requests, count, asked)
                _show(title, len(requests), found[title])
    except TraceError as error:
        print(f"tokens: {error}")
        return 2
    print(msgspec.json.encode(found).decode())
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.tokens", description=__doc__)
    parser.add_argument("--trace", nargs="*", default=list(TRACES), help=", ".join(TRACES))
    parser.add_argument("--engines", nargs="*", type=int, default=[])
    parser.add_argument("--only", nargs="*", default=[], help="names of routers")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a trace, its begin")
    parser.add_argument("--ttft", type=float, default=5_000, help="ms, the goal")
    parser.add_argument("--itl", type=float, default=100, help="ms, the goal")
    parser.add_argument("--http", action="store_true", help="real processes")
    parser.add_argument("--speed", type=float, default=10, help="of engines and arrivals, HTTP")
    parser.add_argument("--peers", type=Path, default=Path(), help="a Python that has the others")
    return parser.parse_args(argv)


def _part(requests: list[Request], seconds: float) -> list[Request]:
    return [each for each in requests if each.at_ms <= 1000 * seconds]


def _virtual(requests: Sequence[Request], count: int, asked: argparse.Namespace) -> Found:
    goal = Goal(asked.ttft, asked.itl)
    return {
        name: play(requests, policy(count), count, LLAMA_70B, goal)
        for name, policy in CHOICES.items()
        if not asked.only or name in asked.only
    }


def _http(requests: Sequence[Request], count: int, asked: argparse.Namespace) -> Found:
    found: Found = {}
    options = ("--speed", str(asked.speed), "--interval", str(STREAM_TOKENS))
    encoded = msgspec.json.encode(HTTP_TABLE).decode()
    for name, start in _starts(asked).items():
        with engines(*options, "--table", encoded, count=count) as ports, start(ports) as target:
            answers = asyncio.run(replay(target, requests, asked.speed))
            busy = [_busy_ms(port) for port in ports]
        good = [_answered(each, asked.speed) for each in answers if not each.problem]
        if wrong := problems(answers):
            print(f"{name}: {wrong}")
        if good:
            goal = Goal(asked.ttft, asked.itl)
            found[name] = outcome(good, busy, goal, len(answers) - len(good))
    return found


def _starts(asked: argparse.Namespace) -> dict[str, Start]:
    starts, missing = available(asked.peers)
    print("\n".join(missing))
    return {name: each for name, each in starts.items() if not asked.only or name in asked.only}


def _answered(answer: Answer, speed: float) -> Answered:
    gap_ms = (answer.last - answer.first) / answer.gaps if answer.gaps > 0 else math.nan
    ttft_ms = (answer.first - answer.began) * 1000 * speed
    return Answered(ttft_ms, gap_ms * 1000 * speed, answer.prompt, answer.cached)


def _busy_ms(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("sim:busy_ms_total"))


def _show(title: str, count: int, found: Found) -> None:
    base = found.get(BASE)
    rows = [
        (
            name,
            f"{each.hit:.1%}",
            f"{each.ttft_mean_ms:,.0f}",
            f"{each.ttft_p50_ms:,.0f}",
            f"{each.ttft_p99_ms:,.0f}",
            ratio(each.ttft_mean_ms, base.ttft_mean_ms) if base else "",
            f"{each.itl_mean_ms:.1f}",
            f"{each.itl_p99_ms:.1f}",
            f"{each.good:.1%}",
            each.imbalance,
        )
        for name, each in found.items()
    ]
    print(f"\n{title}, {count} requests, times in ms")
    print(table(HEADER, rows), flush=True)
    if OURS in found and len(found) > 1:
        best = min((name for name in found if name != OURS), key=lambda n: found[n].ttft_mean_ms)
        of_best = ratio(found[OURS].ttft_mean_ms, found[best].ttft_mean_ms)
        print(f"{OURS}: {of_best} of the next best, {best}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
