"""What `ctx.steps` costs a step, alone and around a DataLoader. Goal: under 50 microseconds.

Run with `python -m bench.overhead`. One process, no work in the loop; the cost is the difference to
the same loop without `ctx.steps`, in the median over several runs that take turns.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from bench.figures import machine, table

STEPS = 20_000
LOADER_STEPS = 2_000
BATCH = 32
TURNS = 5
GOAL_US = 50.0


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


def seconds(make: Callable[[], Iterable[Any]]) -> float:
    loop = make()
    began = time.perf_counter()
    for _ in loop:
        pass
    return time.perf_counter() - began


def listen() -> None:
    """An agent's ear, so that beats are sent as they would be."""
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
