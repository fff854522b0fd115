"""What Shoal costs a training loop: `ctx.steps` per step, and a whole script beside torchrun.

Run with `python -m bench.overhead`. For `ctx.steps` (goal: under 50 microseconds) one process with
no work in the loop; the cost is the difference to the same loop without it. For the script (goal:
0.99 of torchrun's steps per second) plain DDP of two members, unmodified. Medians over runs that
take turns; the last line is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench.figures import machine, table

STEPS = 20_000
LOADER_STEPS = 2_000
BATCH = 32
TURNS = 5
GOAL_US = 50.0
GOAL_RATIO = 0.99


def main() -> None:
    listen()
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import shoal.train

    torch.set_num_threads(1)
    ctx = shoal.train.init()
    data = TensorDataset(torch.arange(LOADER_STEPS * BATCH))
    loader = DataLoader(data, BATCH, shuffle=True)
    loss = torch.zeros(())

    def logged(steps: Iterable[Any]) -> Iterable[Any]:
        for step in steps:
            ctx.log(loss=loss)
            yield step

    def endless() -> Iterable[Any]:
        return ctx.steps(itertools.repeat(None), steps=ctx.step + STEPS)

    rows = []
    for name, count, bare, ours in (
        ("a plain iterable", STEPS, lambda: itertools.repeat(None, STEPS), endless),
        ("with ctx.log", STEPS, lambda: itertools.repeat(None, STEPS), lambda: logged(endless())),
        ("a DataLoader", LOADER_STEPS, lambda: loader, lambda: ctx.steps(loader)),
    ):
        took = [(seconds(bare), seconds(ours)) for _ in range(TURNS)]
        bare_us = statistics.median(pair[0] for pair in took) / count * 1e6
        cost_us = statistics.median(pair[1] - pair[0] for pair in took) / count * 1e6
        verdict = "met" if cost_us < GOAL_US else "missed"
        rows.append((name, f"{bare_us:.1f}", f"{cost_us:.1f}", verdict))
    print(machine())
    print(table(("loop over", "bare us/step", "ctx.steps adds us", f"goal {GOAL_US:.0f} us"), rows))
    shoal_rate, torchrun_rate, ratio = beside_torchrun()
    print(f"plain DDP, steps/s: {shoal_rate:.1f} under Shoal, {torchrun_rate:.1f} under torchrun")
    print(f"ratio of each pair, median: {ratio:.3f} (goal {GOAL_RATIO})")
    figures = {name: float(cost) for name, _, cost, _ in rows}
    print(json.dumps({"ctx_steps_us": figures, "steps_per_s_ratio": round(ratio, 4)}))


def beside_torchrun() -> tuple[float, float, float]:
    """Medians of both, and of the ratios of consecutive runs."""
    script = str(Path(__file__).with_name("overhead_train.py"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rate"
        env = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
        env |= {"SHOAL_HOME": f"{folder}/home", "BENCH_OUT": str(out), "OMP_NUM_THREADS": "1"}
        shoal = [sys.executable, "-m", "shoal.main"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]

        def rate(command: list[str]) -> float:
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
            return float(out.read_text())

        subprocess.run([*shoal, "up", "--nodes", "1", "--port", "0"], env=env, check=True)
        try:
            gang = ["run", "--wait", "-n", "2", "--", sys.executable, script]
            pairs = [(rate([*shoal, *gang]), rate([*torchrun, script])) for _ in range(TURNS)]
        finally:
            subprocess.run([*shoal, "down"], env=env, check=False)
    ratios = [ours / theirs for ours, theirs in pairs]
    ours_all, theirs_all = zip(*pairs, strict=True)
    return statistics.median(ours_all), statistics.median(theirs_all), statistics.median(ratios)


def seconds(make: Callable[[], Iterable[Any]]) -> float:
    loop = make()
    began = time.perf_counter()
    for _ in loop:
        pass
    return time.perf_counter() - began


def listen() -> None:
    """A socket in the place of an agent, so that beats are really sent."""
    name = f"shoal-bench-{os.getpid()}"
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.bind("\0" + name)
    os.environ |= {"SHOAL_BEATS": name, "SHOAL_REF": "bench.1.0"}
    os.environ.pop("WORLD_SIZE", None)

    def hear() -> None:
        while ear.recv(65536):
            pass

    threading.Thread(target=hear, daemon=True).start()


if __name__ == "__main__":
    main()
