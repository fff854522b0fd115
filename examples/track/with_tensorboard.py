"""Writes what TensorBoard shows, and serves it with Shoal.

    shoal run --env LOGDIR=/shared/runs -- python with_tensorboard.py
    shoal serve tb -- sh -c 'exec tensorboard --logdir /shared/runs --host 0.0.0.0 --port $PORT'

Each job writes to a folder of its own, and a restarted one goes on in its folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


def main() -> None:
    folder = Path(os.environ.get("LOGDIR", "runs")) / os.environ.get("SHOAL_RUN_ID", "here")
    with SummaryWriter(folder) as writer:
        for step in range(100):
            writer.add_scalar("loss", 1 / (1 + step), step)


if __name__ == "__main__":
    main()
