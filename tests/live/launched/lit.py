"""A Lightning script, for so many nodes with so many processes each: `lit.py NODES DEVICES`."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    nodes, devices = int(sys.argv[1]), int(sys.argv[2])
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp" if nodes * devices > 1 else "auto",
        num_nodes=nodes,
        devices=devices,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2))
    where = f"rank {trainer.global_rank} of {trainer.world_size} on node {trainer.node_rank}"
    print(f"{where}: {trainer.global_step} steps", flush=True)
    if nodes > 1:
        told = type(trainer.strategy.cluster_environment).__name__
        print(f"ranks are {told}'s", flush=True)


if __name__ == "__main__":
    main()
