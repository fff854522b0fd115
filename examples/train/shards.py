"""An image classifier that reads the shards of a volume, and survives whatever happens.

    python shards.py --write /data/digits                     # once: 8 tar files, as webdataset has
    shoal run -n 2 --volume /data/digits:digits -- python shards.py
    python shards.py --volume /data/digits                    # the same on a laptop

Saves go to SHOAL_CHECKPOINT_DIR; alone, give --checkpoint. A run that was killed goes on with the
samples that were left, with any number of members. At the end it prints its steps per second.
"""

from __future__ import annotations

import argparse
import io
import tarfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import shoal.data
import shoal.train
from data import digits
from model import DigitNet

SHARDS = 8


def write(folder: Path, samples: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = digits(samples, seed=1).tensors
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard:03}.tar", "w") as tar:
            for number in range(shard, samples, SHARDS):
                pixels = (images[number] * 127).to(torch.uint8).numpy().tobytes()
                for suffix, data in (("img", pixels), ("cls", b"%d" % labels[number])):
                    info = tarfile.TarInfo(f"{number:06}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    pixels = torch.frombuffer(bytearray(sample["img"]), dtype=torch.uint8)
    return pixels.reshape(1, 16, 16) / 127, int(sample["cls"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="write the shards into this folder, and end")
    parser.add_argument("--volume", default="digits", help="the name of a volume, a folder, a URL")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--checkpoint", default=None, help="a directory, or s3://bucket/path")
    options = parser.parse_args()
    if options.write:
        write(options.write, options.samples)
        return

    ctx = shoal.train.init(checkpoint=options.checkpoint)
    torch.manual_seed(0)
    model = DigitNet().to(ctx.device)
    trained = DistributedDataParallel(model) if ctx.world > 1 else model
    optimizer = torch.optim.Adam(trained.parameters(), lr=3e-3)
    state = {"model": trained, "optimizer": optimizer}
    ctx.restore(state)
    data = shoal.data.open(options.volume, decode=decode, buffer=2000)
    loader = DataLoader(data, batch_size=64, num_workers=options.workers)
    first, began = ctx.step, time.perf_counter()
    loss = torch.zeros(())
    for step, (images, labels) in ctx.steps(loader, epochs=options.epochs):
        loss = functional.cross_entropy(trained(images.to(ctx.device)), labels.to(ctx.device))
        optimizer.zero_grad()
        (loss * ctx.weight).backward()
        optimizer.step()
        ctx.log(loss=loss)
        if ctx.can_save:
            ctx.save(state, every="auto")
        if ctx.rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    if ctx.rank == 0:
        speed = (ctx.step - first) / (time.perf_counter() - began)
        print(f"loss {loss.item():.3f} after step {ctx.step}, {speed:.1f} steps/s")


if __name__ == "__main__":
    main()
