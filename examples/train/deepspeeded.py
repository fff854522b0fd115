"""A DeepSpeed script with ZeRO stage 1: saves and loads with the engine's own calls.

shoal run -n 2 -- python deepspeeded.py
"""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from plain import checkpoint_file, loader, options
from torch.nn import functional

from model import DigitNet


def main() -> None:
    asked = options()
    if not torch.cuda.is_available():  # gloo does all of it, and nothing has to be compiled first
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    model = DigitNet()
    config = {
        "train_micro_batch_size_per_gpu": 64 // world,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), config=config
    )
    directory = str(checkpoint_file("deepspeed"))
    path, client = engine.load_checkpoint(directory)  # None where there is nothing yet
    first = client["epoch"] if path else 0
    if path:
        print(f"goes on with epoch {first}", flush=True)
    batches = loader(asked.samples, world, rank)
    for epoch in range(first, asked.epochs):
        batches.sampler.set_epoch(epoch)
        for images, labels in batches:
            loss = functional.cross_entropy(engine(images.to(engine.device)), labels)
            engine.backward(loss)
            engine.step()
        tag, state = f"epoch-{epoch}", {"epoch": epoch + 1}
        engine.save_checkpoint(directory, tag=tag, client_state=state, save_latest=False)
        dist.barrier()  # by itself, rank 0 would point at it before the others have saved
        if rank == 0:
            (new := checkpoint_file("deepspeed/latest.new")).write_text(tag)
            new.replace(new.with_name("latest"))
            print(f"epoch {epoch} done: loss {loss.item():.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
