"""Detects the CPUs, memory and GPUs of this machine."""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

NVIDIA_SMI_TIMEOUT_S = 10
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")


class Gpus(NamedTuple):
    """If the GPUs differ, the model is that of the first, the memory that of the smallest."""

    number: int
    model: str = ""
    memory_mb: int = 0  # 0: unknown


class Hardware(NamedTuple):
    name: str
    cpus: int
    memory_mb: int
    gpus: Gpus


def detect() -> Hardware:
    return Hardware(node_name(platform.node()), cpus(), memory_mb(), gpus())


def cpus() -> int:
    """The CPUs that this process may use; in a container these can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_mb() -> int:
    """The installed memory, or the limit of the container if that is smaller."""
    import psutil

    total: int = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(CGROUP_MEMORY.read_text()))
    return total // (1024 * 1024)


def gpus() -> Gpus:
    """Asks the driver's library, then its tool, then counts its device files."""
    for look in (_by_library, _by_tool):
        found = look()
        if found is not None:
            return found
    return Gpus(len(glob.glob("/dev/nvidia[0-9]*")))


def node_name(host: str) -> str:
    """A host name as a node id: the first label, in lower case."""
    label = re.sub(r"[^a-z0-9-]", "-", host.split(".")[0].lower()).strip("-")
    return label[:63] or "n1"


def _by_library() -> Gpus | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: NVML has its own exceptions for each
        return None
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(int(pynvml.nvmlDeviceGetCount()))
        ]
        model = pynvml.nvmlDeviceGetName(handles[0]) if handles else ""
        sizes = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
        return Gpus(
            len(handles),
            model.decode() if isinstance(model, bytes) else model,
            min(sizes, default=0) // (1024 * 1024),
        )
    except Exception:
        return None
    finally:
        pynvml.nvmlShutdown()


def _by_tool() -> Gpus | None:
    command = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_listing(run.stdout)


def parse_listing(text: str) -> Gpus:
    """The tool prints a line like '143771, NVIDIA H200' per GPU. For a few devices the memory is
    '[N/A]'."""
    found = re.findall(r"^\s*([0-9]+|\[[^\]]*\]), (.+?)\s*$", text, flags=re.MULTILINE)
    sizes = [int(size) for size, _ in found if size.isdigit()]
    known = len(sizes) == len(found)
    return Gpus(len(found), found[0][1] if found else "", min(sizes, default=0) if known else 0)
