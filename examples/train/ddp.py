"""Plain PyTorch DDP, as it would be written for torchrun: saves each epoch, goes on with the next.

shoal run -n 2 -- python ddp.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from plain import checkpoint_file, loader, options, own_device, replace
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from model import DigitNet


def main() -> None:
    asked = options()
    device = own_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(DigitNet().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    file, first = checkpoint_file("ddp.pt"), 0
    if file.exists():
        saved = torch.load(file, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
        print(f"goes on with epoch {first}", flush=True)
    batches = loader(asked.samples, dist.get_world_size(), dist.get_rank())
    for epoch in range(first, asked.epochs):
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            replace(file, state | {"epoch": epoch + 1})
            print(f"epoch {epoch} done: loss {loss.item():.3f}", flush=True)
    dist.barrier()  # the threads of the last averaging are done before the group goes
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
