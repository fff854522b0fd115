"""Our engine model beside Dynamo's simulator: the same trace, each with its own engines.

python -m bench.tokens_dynamo --python /tmp/dynamo/bin/python

The environment: pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1, and
typing_extensions and pydantic. Both play Mooncake's trace on 16 engines of 1 M tokens of cache. The
table below was fitted to Dynamo's round robin alone; what its KV router gains is then a prediction.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.engine.model import Table

from bench.figures import machine, ratio, table
from bench.token_policies import Dynamo, RoundRobin
from bench.token_traces import BLOCK, FOLDER, MOONCAKE, TraceError, mooncake
from bench.tokens_virtual import Goal, play

ENGINES = 16
TABLE = Table(
    step_ms=5.6,
    prompt_ms=0.0185,
    attention_ms=0.02,
    sequence_ms=0.1,
    context_ms=0.00004,
    block_tokens=BLOCK,
    blocks=16_384 * 64 // BLOCK,  # the simulator's default
)
REPLAY = f"""
import json, sys
from dynamo.replay import run_trace_replay
for mode in ("round_robin", "kv_router"):
    report = run_trace_replay(sys.argv[1], num_workers={ENGINES}, router_mode=mode,
                              trace_block_size={BLOCK})
    print("report", json.dumps(report.summary, default=str))
"""
NAMES = ("prefix_cache_reused_ratio", "mean_ttft_ms", "p99_ttft_ms", "mean_itl_ms")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.tokens_dynamo", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="one that has ai-dynamo")
    asked = parser.parse_args(argv)
    print(machine())
    try:
        requests = mooncake(FOLDER)
    except TraceError as error:
        print(f"tokens_dynamo: {error}", file=sys.stderr)
        return 2
    theirs = _replay(asked.python)
    outcomes = [
        play(requests, policy(ENGINES), ENGINES, TABLE, Goal()) for policy in (RoundRobin, Dynamo)
    ]
    ours = [[each.hit, each.ttft_mean_ms, each.ttft_p99_ms, each.itl_mean_ms] for each in outcomes]
    rows = [
        (f"{who}, {mode}", f"{each[0]:.1%}", *(f"{value:,.1f}" for value in each[1:]))
        for who, both in (("Dynamo's simulator", theirs), ("harness.engine", ours))
        for mode, each in zip(("round robin", "KV router"), both, strict=True)
    ]
    print(table(("", "hit", "TTFT mean", "p99", "ITL mean"), rows))
    gains = {"dynamo": ratio(theirs[1][1], theirs[0][1]), "ours": ratio(ours[1][1], ours[0][1])}
    print(f"mean TTFT of the KV router over round robin: {gains}")
    print(json.dumps({"dynamo": theirs, "ours": ours, "ttft_kv_over_round_robin": gains}))
    return 0


def _replay(python: Path) -> list[list[float]]:
    with tempfile.TemporaryDirectory(prefix="dynamo-") as folder:
        plain = Path(folder, "trace.jsonl")
        plain.write_bytes(gzip.decompress((FOLDER / MOONCAKE).read_bytes()))
        command = [str(python), "-c", REPLAY, str(plain)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("report ")]
    if len(lines) != 2:
        raise SystemExit(f"tokens_dynamo: {(done.stderr.strip() or done.stdout)[-500:]}")
    found: list[dict[str, Any]] = [json.loads(line.removeprefix("report ")) for line in lines]
    return [[float(each[name]) for name in NAMES] for each in found]


if __name__ == "__main__":
    raise SystemExit(main())
