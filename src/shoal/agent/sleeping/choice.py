"""Which way to sleep this node has."""

from __future__ import annotations

import msgspec

from shoal.agent.sleeping.freeze import Freeze
from shoal.agent.sleeping.port import Sleeping
from shoal.model.commands import Launch
from shoal.model.node import NodeSpec

WHY_LETTERS_MAX = 200


def way_of(spec: NodeSpec, *, real: bool) -> Sleeping:
    """`real`: this machine has NVIDIA's devices. Members without GPUs only have to be stopped."""
    if not (spec.gpus and real):
        return Freeze()
    from shoal.agent.sleeping.cuda import Cuda  # other nodes do without ctypes and its memory

    return Cuda()


def why_not(way: Sleeping, launch: Launch) -> str:
    """What is known before its processes are looked at; empty if it may sleep."""
    if way.name == Freeze.name or not launch.gpus or launch.env.get("WORLD_SIZE", "1") == "1":
        return ""
    return "it is one of a gang on GPUs, and NCCL's memory cannot be brought back"


def described(spec: NodeSpec, way: Sleeping) -> NodeSpec:
    """What the controller has to know of it. `why_not` may take a moment."""
    why = way.why_not()[:WHY_LETTERS_MAX]
    frozen = way.name == Freeze.name  # GPUs that exist only in the books can be any
    return msgspec.structs.replace(
        spec, sleep="" if why else way.name, sleep_why=why, remaps=frozen
    )
