"""What the plain scripts share. They know nothing of Shoal but where checkpoints are kept."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from data import digits


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4000)
    return parser.parse_args()


def checkpoint_file(name: str) -> Path:
    """Survives attempts: Shoal gives each job a directory of its own."""
    directory = Path(os.environ.get("SHOAL_CHECKPOINT_DIR", "checkpoints"))
    directory.mkdir(parents=True, exist_ok=True)
    return directory / name


def own_device() -> torch.device:
    """Launchers show each process all GPUs of the member, and say which of them is its own."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    number = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def loader(samples: int, world: int, rank: int) -> DataLoader:
    data = digits(samples, seed=1)
    sampler = DistributedSampler(data, world, rank, shuffle=True)
    return DataLoader(data, batch_size=64 // world, sampler=sampler)


def replace(file: Path, content: object) -> None:
    """A process that is killed while it saves leaves the checkpoint before."""
    new = file.with_suffix(".new")
    torch.save(content, new)
    os.replace(new, file)


def newest(name: str) -> int:
    """How far the newest checkpoint is; 0 if there is none."""
    pointer = checkpoint_file(f"{name}-newest")
    return int(pointer.read_text()) if pointer.exists() else 0


def point_at_newest(name: str, done: int) -> None:
    """When all members have saved, and not before: a torn save is never pointed at."""
    alone = not dist.is_initialized()  # as Accelerate leaves it for a single process
    if not alone:
        dist.barrier()
    if alone or dist.get_rank() == 0:
        new = checkpoint_file(f"{name}-newest.new")
        new.write_text(str(done))
        os.replace(new, checkpoint_file(f"{name}-newest"))
