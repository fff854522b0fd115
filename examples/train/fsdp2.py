"""Plain PyTorch FSDP2: sharded parameters, sharded checkpoints of torch's own kind.

shoal run -n 2 -- python fsdp2.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from plain import checkpoint_file, loader, newest, options, own_device, point_at_newest
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from model import DigitNet


def main() -> None:
    asked = options()
    device = own_device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = DigitNet().to(device)
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if first := newest("fsdp2"):
        weights, moments = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": moments}
        dcp.load(saved, checkpoint_id=str(checkpoint_file(f"fsdp2-{first}")))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        print(f"goes on with epoch {first}", flush=True)
    batches = loader(asked.samples, dist.get_world_size(), dist.get_rank())
    for epoch in range(first, asked.epochs):
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        dcp.save(
            {"model": weights, "optimizer": moments},
            checkpoint_id=str(checkpoint_file(f"fsdp2-{epoch + 1}")),
        )
        point_at_newest("fsdp2", epoch + 1)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} done: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
