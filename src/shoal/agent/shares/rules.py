"""What a member with a share of a GPU may use, and the variables that make it so. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from shoal.model.commands import Launch
from shoal.model.resources import WHOLE_GPU_MILLI

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
LOGS = "CUDA_MPS_LOG_DIRECTORY"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Torch's allocator, by its old and its new name.
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
FRACTION = "per_process_memory_fraction"
TORCH_WITH_FRACTION = (2, 10)  # earlier ones fail at an option they do not know
# A CUDA context, its kernels and libraries take memory that no allocator counts.
CONTEXT_MB = 1_024


class Share(NamedTuple):
    """A part of one GPU."""

    gpu: int
    memory_mb: int  # 0: not known, because the node's GPUs have no size
    percent: int  # of its compute units
    uid: int = 0  # the Unix user, 0: the agent's own

    @property
    def most_mb(self) -> int:
        """Beyond this, a member uses what others asked for."""
        return self.memory_mb + CONTEXT_MB


def share_of(launch: Launch, gpu_memory_mb: int) -> Share | None:
    """None for a member with whole GPUs, or none. `gpu_memory_mb` is the size of a GPU."""
    if len(launch.gpus) != 1 or not 0 < launch.gpu_milli < WHOLE_GPU_MILLI:
        return None
    memory_mb = launch.gpu_memory_mb or gpu_memory_mb * launch.gpu_milli // WHOLE_GPU_MILLI
    percent = max(1, round(launch.gpu_milli * 100 / WHOLE_GPU_MILLI))
    return Share(launch.gpus[0], memory_mb, percent, launch.uid)


def daemon_env(gpu: int, folder: str) -> dict[str, str]:
    """For the MPS daemon of one GPU."""
    return {
        PIPES: folder,
        LOGS: folder,
        VISIBLE: str(gpu),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which NVML and Shoal count GPUs
    }


def client_env(share: Share, folder: str) -> dict[str, str]:
    """For a member. Its GPU is the daemon's only one, so the number of that GPU is 0 here."""
    env = {PIPES: folder, VISIBLE: "0", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share.percent)}
    if share.memory_mb:
        env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={share.memory_mb}M"
    return env


def allocator_env(share: Share, gpu_memory_mb: int, env: Mapping[str, str]) -> dict[str, str]:
    """Torch's own limit, added to the options that the job sets itself."""
    if not share.memory_mb or not gpu_memory_mb:
        return {}
    limit = f"{FRACTION}:{min(1.0, share.memory_mb / gpu_memory_mb):.4f}"
    found = {}
    for name in ALLOCATOR:
        own = env.get(name, "")
        if FRACTION in own:
            return {}  # the job sets a limit; whether it is low enough is seen by looking
        if own:
            found[name] = f"{own},{limit}"
    return found or {ALLOCATOR[0]: limit}


def knows_fraction(version_file: str) -> bool:
    """Does the torch with this version.py take the option?"""
    match = re.search(r"""__version__\s*=\s*['"](\d+)\.(\d+)""", version_file)
    return match is not None and (int(match[1]), int(match[2])) >= TORCH_WITH_FRACTION
