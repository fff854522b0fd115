"""A DDP training that counts its steps and saves each of them, with nothing of Shoal in it but the
folder for checkpoints. It ends when the file `finish` is there. No disk is shared."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

PAUSE_S = 0.2


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    file, step = Path(os.environ["SHOAL_CHECKPOINT_DIR"]) / "ddp.pt", 0
    if file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    said = [None] * dist.get_world_size()
    dist.all_gather_object(said, (step, float(model.module.weight.sum())))
    first = dist.get_rank() == 0
    if first:
        print(f"attempt {os.environ['SHOAL_ATTEMPT']} begins with step {step}: {said}", flush=True)
    over = False
    while not over:
        loss = model(torch.ones(8, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        ends = [Path(os.environ["FINISH"]).exists() if first else None]
        if first:
            torch.save({"model": model.state_dict(), "step": step}, file.with_suffix(".new"))
            os.replace(file.with_suffix(".new"), file)
            print(f"saved step {step}", flush=True)
        dist.broadcast_object_list(ends, 0)
        over = bool(ends[0])
        time.sleep(PAUSE_S)
    if first:
        Path(os.environ["SHOAL_OUTPUT"], "model.txt").write_text(f"{step}\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
