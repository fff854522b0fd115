"""Makes the nodes of a cluster from the flags of `shoal up` and the detected hardware. Pure."""

from __future__ import annotations

import re

from shoal.cli.up.hardware import Hardware
from shoal.forms.failure import USAGE, Failure
from shoal.model.node import GPUS_PER_NODE_MAX, NodeSpec

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
