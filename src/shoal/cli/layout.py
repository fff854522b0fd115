"""From the flags of `shoal up` to the nodes of a cluster: pure, given what the machine has."""

from __future__ import annotations

import re

from shoal.cli.machine import Machine
from shoal.forms.failure import USAGE, Failure
from shoal.model.node import GPUS_PER_NODE_MAX, NodeSpec

# Each is a process of its own on this machine.
VIRTUAL_NODES_MAX = 256


def this_machine(machine: Machine) -> tuple[NodeSpec, ...]:
    return (
        NodeSpec(
            id=machine.name,
            cpu_milli=machine.cpus * 1000,
            memory_mb=machine.memory_mb,
            gpus=machine.gpus.number,
            gpu_model=machine.gpus.model,
            gpu_memory_mb=machine.gpus.memory_mb,
        ),
    )


def virtual_nodes(
    machine: Machine,
    *,
    nodes: int,
    gpus: int,
    cpu_milli: int | None,
    memory_mb: int | None,
    topology: str,
    gpu_model: str = "",
    gpu_memory_mb: int = 0,
) -> tuple[NodeSpec, ...]:
    """n1..nN, alike. CPUs are many by default, so that GPUs are what runs out first."""
    if not 1 <= nodes <= VIRTUAL_NODES_MAX:
        raise Failure(f"--nodes: must be from 1 to {VIRTUAL_NODES_MAX}, not {nodes}", USAGE)
    if not 0 <= gpus <= GPUS_PER_NODE_MAX:
        raise Failure(f"--gpus: must be from 0 to {GPUS_PER_NODE_MAX}, not {gpus}", USAGE)
    if not gpus and (gpu_model or gpu_memory_mb):
        flag = "--gpu-model" if gpu_model else "--gpu-memory"
        raise Failure(f"{flag}: has no effect without GPUs; add e.g. --gpus 8", USAGE)
    where = places(topology, nodes) if topology else [""] * nodes
    if cpu_milli is None:
        cpu_milli = 1000 * max(machine.cpus, 2 * gpus, 4)
    if memory_mb is None:
        memory_mb = machine.memory_mb // nodes
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
    """'2x2' for 8 nodes: two each in b1/r1, b1/r2, b2/r1, b2/r2. Neighbours share a rack."""
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
