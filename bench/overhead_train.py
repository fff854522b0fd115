"""What `bench/overhead.py` runs under Shoal and under torchrun: plain DDP, two members, no Shoal.

Rank 0 writes its steps per second, without the start and the first steps, into BENCH_OUT.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

WARM, STEPS, WIDTH, BATCH = 50, 600, 384, 64


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(BATCH, WIDTH)
    began = 0.0
    for step in range(WARM + STEPS):
        if step == WARM:
            began = time.perf_counter()
        loss = (model(data) - data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    took = time.perf_counter() - began
    if torch.distributed.get_rank() == 0:
        Path(os.environ["BENCH_OUT"]).write_text(str(STEPS / took))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
