"""A tiny run whose state counts how often each sample was used: `tiny.py SAMPLES BATCH EPOCHS`.

Prints `step N` when a step is done, and at the end `used [...]`, `loss X`. Further behavior by the
environment: EVERY (steps between saves, or auto), DIE_AT (exit hard before that step is done),
KIND (ddp, fsdp or none), SLEEP (seconds of work per step), LOOPS (calls of `steps`), SEED,
WIDTH (of the model), FORGET (to restore), FILE_BYTES_MAX (no larger files can be written, until
step LARGER_FROM is done),
SHOAL_VOLUME_TINY (shards of JSON with the numbers of the samples), WORKERS (of the loader).
"""

from __future__ import annotations

import itertools
import os
import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import shoal.data
import shoal.train.saver


def wrapped(model: Any, kind: str) -> Any:
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        return fully_shard(model)
    return torch.nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model


def main() -> None:
    samples, batch, epochs = (int(text) for text in sys.argv[1:4])
    every_text = os.environ.get("EVERY", "2")
    every: Any = every_text if every_text == "auto" else int(every_text)
    die_at = int(os.environ.get("DIE_AT", "-1"))
    sleep_s = float(os.environ.get("SLEEP", "0"))
    ctx = shoal.train.init(keep=2, seed=int(os.environ.get("SEED", "0")))
    kind = os.environ.get("KIND", "ddp") if ctx.world > 1 else "none"
    torch.manual_seed(0)
    width = int(os.environ.get("WIDTH", "8"))
    layers = torch.nn.Linear(2, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
    model = wrapped(torch.nn.Sequential(*layers), kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    used = torch.zeros(samples, dtype=torch.long)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "used": used, "note": "first"}
    if not os.environ.get("FORGET") and ctx.restore(state):
        print(f"restored {ctx.step} {state['note']}", flush=True)
    if limit := int(os.environ.get("FILE_BYTES_MAX", "0")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        shoal.train.saver.AGAIN_S = (0.05, 0.05)
    larger_from = int(os.environ.get("LARGER_FROM", "-1"))
    numbers = torch.arange(samples)
    points = torch.stack([numbers / samples, (numbers % 7) / 7], 1)
    data = TensorDataset(numbers, points, points.sum(1, keepdim=True))
    loss = torch.zeros(())
    loader = DataLoader(data, batch, shuffle=True)
    if os.environ.get("SHOAL_VOLUME_TINY"):
        stream = shoal.data.open("tiny", buffer=7, decode=lambda sample: data[sample["number"]])
        loader = DataLoader(stream, batch, num_workers=int(os.environ.get("WORKERS", "0")))
    loops = [ctx.steps(loader, epochs=epochs) for _ in range(int(os.environ.get("LOOPS", "1")))]
    for step, (number, x, y) in itertools.chain(*loops):
        time.sleep(sleep_s)
        loss = ((model(x) - y) ** 2).mean() * ctx.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = torch.zeros_like(used)
        if ctx.weight > 0:
            # A batch over the end of an epoch may hold a sample twice.
            now.index_add_(0, number, torch.ones_like(number))
        if ctx.world > 1:
            dist.all_reduce(now)
        used += now
        if step == die_at:
            os._exit(9)
        if step == larger_from:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        ctx.log(loss=loss, step_number=step)
        state["note"] = f"after {step}"
        ctx.save(state, every=every)
        print(f"step {step}", flush=True)
    ctx.close()
    print(f"used {used.tolist()}")
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
