"""Steps that compute for a while, through `busy.py KIND` (ddp or fsdp): for who is slow."""

from __future__ import annotations

import sys

import torch

import shoal.train

STEPS = 25
WORK = 20  # so that a step is mostly computing


def main() -> None:
    ctx = shoal.train.init()
    layers = [torch.nn.Linear(256, 256) for _ in range(2)]
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    if sys.argv[1] == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(128, 256)
    print("ready", flush=True)
    for _, data in ctx.steps([batch], steps=STEPS):
        for _ in range(WORK):
            data = (data @ data.T @ data).tanh()
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ctx.log(loss=loss)


if __name__ == "__main__":
    main()
