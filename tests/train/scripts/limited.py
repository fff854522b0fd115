"""A plain DDP script whose steps are limited by one thing: `limited.py compute|input|network`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import shoal.train.watch  # noqa: F401

STEPS = 33
LONG_S = 0.03
GRADIENTS_MB = 24


class Slow(Dataset[torch.Tensor]):  # type: ignore[misc]
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if sys.argv[1] == "input":
            time.sleep(LONG_S)
        return torch.full((4,), float(index))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    big = torch.zeros(GRADIENTS_MB << 18)
    for batch in DataLoader(Slow(), batch_size=1):
        loss = model(batch).square().mean()
        if sys.argv[1] == "compute":
            time.sleep(LONG_S)
        optimizer.zero_grad()
        loss.backward()
        if sys.argv[1] == "network":
            dist.all_reduce(big)
        optimizer.step()
        time.sleep(0.005 if sys.argv[1] != "network" else 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
