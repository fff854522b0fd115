"""The CPUs, memory and GPUs of this machine, and the nodes that `shoal up` makes of them."""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from shoal.forms.failure import USAGE, Failure
from shoal.model.node import GPUS_PER_NODE_MAX, NodeSpec

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


# Makes the nodes of a cluster from the flags of `shoal up` and the detected hardware. Pure.


# Each virtual node is a process on this machine.
VIRTUAL_NODES_MAX = 256


def this_machine(hardware: Hardware) -> tuple[NodeSpec, ...]:
    return (
        NodeSpec(
            id=hardware.name,
            cpu_milli=hardware.cpus * 1000,
            memory_mb=hardware.memory_mb,
            gpus=hardware.gpus.number,
            gpu_model=hardware.gpus.model,
            gpu_memory_mb=hardware.gpus.memory_mb,
        ),
    )


def virtual_nodes(
    hardware: Hardware,
    *,
    nodes: int,
    gpus: int,
    cpu_milli: int | None,
    memory_mb: int | None,
    topology: str,
    gpu_model: str = "",
    gpu_memory_mb: int = 0,
) -> tuple[NodeSpec, ...]:
    """Equal nodes n1..nN. By default they have many CPUs, so that GPUs run out first."""
    if not 1 <= nodes <= VIRTUAL_NODES_MAX:
        raise Failure(f"--nodes: must be from 1 to {VIRTUAL_NODES_MAX}, not {nodes}", USAGE)
    if not 0 <= gpus <= GPUS_PER_NODE_MAX:
        raise Failure(f"--gpus: must be from 0 to {GPUS_PER_NODE_MAX}, not {gpus}", USAGE)
    if not gpus and (gpu_model or gpu_memory_mb):
        flag = "--gpu-model" if gpu_model else "--gpu-memory"
        raise Failure(f"{flag}: has no effect without GPUs; add e.g. --gpus 8", USAGE)
    where = places(topology, nodes) if topology else [""] * nodes
    if cpu_milli is None:
        cpu_milli = 1000 * max(hardware.cpus, 2 * gpus, 4)
    if memory_mb is None:
        memory_mb = hardware.memory_mb // nodes
    return tuple(
        NodeSpec(
            id=f"n{number + 1}",
            cpu_milli=cpu_milli,
            memory_mb=memory_mb,
            gpus=gpus,
            gpu_model=gpu_model,
            gpu_memory_mb=gpu_memory_mb,
            place=where[number],
        )
        for number in range(nodes)
    )


def places(topology: str, nodes: int) -> list[str]:
    """'2x2' for 8 nodes puts two each in b1/r1, b1/r2, b2/r1, b2/r2. Neighbours share a rack."""
    match = re.fullmatch(r"\s*([0-9]{1,4})\s*[xX]\s*([0-9]{1,4})\s*", topology)
    if match is None or not int(match[1]) or not int(match[2]):
        message = "--topology: write BLOCKSxRACKS, e.g. 2x4 for two blocks of four racks each"
        raise Failure(message, USAGE)
    racks_per_block = int(match[2])
    racks = int(match[1]) * racks_per_block
    if racks > nodes:
        message = f"--topology: {topology.strip()} has {racks} racks, but there are {nodes} nodes"
        raise Failure(f"{message}; use more nodes or fewer racks", USAGE)
    numbers = [number * racks // nodes for number in range(nodes)]
    return [f"b{rack // racks_per_block + 1}/r{rack % racks_per_block + 1}" for rack in numbers]
