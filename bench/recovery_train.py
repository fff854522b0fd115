"""What `bench/recovery.py` trains: DDP with two members that records its progress in a file.

Runs under `shoal run`, torchrun and Ray Train. Each line of BENCH_MARKS is `time rank pid
node what`: `begin` (before torch is imported), `joined`, `restored`, and the number of each step
that is done, written by rank 0 when all have done it.
"""

from __future__ import annotations

import os
import time

STEP_S = 0.05  # of a step; a save every 20 steps loses half a second on average
EVERY = 20
WIDTH = 256


def main() -> None:
    mark("begin")
    import torch

    import shoal.train

    ctx = shoal.train.init()
    mark("joined")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    ctx.restore(state)
    mark("restored")
    for step, _ in ctx.steps([None], steps=1 << 40):
        time.sleep(STEP_S)
        loss = model(torch.randn(8, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.save(state, every=EVERY)
        mark(str(step))


def mark(what: str) -> None:
    """One write, so that lines of several processes do not mix."""
    rank, node = os.environ.get("RANK", "0"), os.environ.get("SHOAL_NODE", "-")
    line = f"{time.time():.4f} {rank} {os.getpid()} {node} {what}\n"
    handle = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(handle, line.encode())
    os.close(handle)


if __name__ == "__main__":
    main()
