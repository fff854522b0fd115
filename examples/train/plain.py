"""What the plain scripts share. They know nothing of Shoal but where checkpoints are kept."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from data import digits
from torch.utils.data import DataLoader, DistributedSampler


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


def loader(samples: int, world: int, rank: int) -> DataLoader:
    data = digits(samples, seed=1)
    sampler = DistributedSampler(data, world, rank, shuffle=True)
    return DataLoader(data, batch_size=64 // world, sampler=sampler)


def replace(file: Path, content: object) -> None:
    """A process that is killed while it saves leaves the checkpoint before."""
    new = file.with_suffix(".new")
    torch.save(content, new)
    os.replace(new, file)
