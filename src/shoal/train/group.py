"""The process group of a run: rank, device, and how members agree on values."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, TypeVar

from shoal.train.errors import TrainError

T = TypeVar("T")

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LEAVE_S = 0.05
STOP_KEY = "shoal/stop"


class Group:
    """The members of a run. With one member there is no process group."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.local_rank = _number("LOCAL_RANK", 0)
        self.device = _device(self.local_rank)
        if not dist.is_initialized() and "WORLD_SIZE" in os.environ:
            _join(self.device)
        self.joined = dist.is_initialized()
        self.rank = dist.get_rank() if self.joined else 0
        self.world = dist.get_world_size() if self.joined else 1
        # For checkpoints, which run beside the training's own collectives. They need a group of
        # their own, and one between CPUs, so that they do not disturb the GPUs.
        self.side: Any = dist.new_group(backend="gloo") if self.world > 1 else None
        self._store: Any = None
        if self.world > 1:
            with contextlib.suppress(Exception):  # without a store a stop cannot be agreed on
                self._store = dist.distributed_c10d._get_default_store().clone()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @property
    def nodes(self) -> int:
        return max(1, self.world // max(1, _number("LOCAL_WORLD_SIZE", 1)))

    def agree(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.side is None:
            return value
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.side)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.side is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.side)
        return values

    # -- a stop that one member was asked to make ------------------------------------------

    def propose_stop(self, step: int) -> int:
        """The step before which all members stop; the first proposal counts."""
        if self._store is None:
            return step
        try:
            return int(self._store.compare_set(STOP_KEY, "", str(step)))
        except (RuntimeError, ValueError):
            return step

    def proposed_stop(self) -> int | None:
        if self._store is None:
            return None
        try:
            return int(self._store.get(STOP_KEY)) if self._store.check([STOP_KEY]) else None
        except (RuntimeError, ValueError):
            return None  # the store ended with rank 0; the collectives will report it

    def leave(self) -> None:
        import torch.distributed as dist

        self._store = None
        if dist.is_initialized():
            # A Gloo thread may need the GIL to free its last work, while the group's destructor
            # holds the GIL and waits for that thread (seen with torch 2.13).
            threading.Event().wait(LEAVE_S)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def _join(device: Any) -> None:
    import torch.distributed as dist

    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        raise TrainError(
            f"WORLD_SIZE is set but {', '.join(missing)} is not: start the script with "
            "`shoal run` or `torchrun`, or unset WORLD_SIZE to run it alone"
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        _number(name, 0)
    try:
        if device.type == "cuda":
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        first = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise TrainError(f"cannot join the group at {where}: {first}") from None


def _device(local_rank: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Some launchers show each process one GPU, others show it all of them.
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise TrainError(f"{name}={text!r} in the environment is not a number") from None
