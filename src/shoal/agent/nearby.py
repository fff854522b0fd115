"""What stands next to a member's GPUs: the CPUs and memory of their socket, and the cards."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.machine.cgroups import Ceiling
from shoal.model.commands import Launch
from shoal.model.node import JOB_GPUS
from shoal.model.tree import Tree, beside, cards_of, numbers_in


def binds(tree: Tree | msgspec.UnsetType) -> bool:
    """Can members be bound to some of the CPUs here?"""
    return isinstance(tree, Tree) and len(tree.numas) > 1


class Nearby:
    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def bound(self, launch: Launch, ceiling: Ceiling, others: Iterable[Ceiling]) -> Ceiling:
        """With the CPUs next to its GPUs, if all members that are bound there, these `others`, get
        as many as they asked for. A container engine that makes its own group is not bound."""
        if not launch.gpus:
            return ceiling
        near = beside(self._tree, launch.gpus, launch.cpu_milli)
        if near is None:
            return ceiling
        cpus = set(numbers_in(near.cpus))
        there = [one for one in others if one.cpus and cpus & set(numbers_in(one.cpus))]
        if sum(one.cpu_milli for one in there) + launch.cpu_milli > near.count * 1000:
            return ceiling
        return ceiling._replace(cpus=near.cpus, mems=near.mems)

    def cards(self, launch: Launch) -> dict[str, str]:
        """For a gang: the cards next to all of its GPUs here. NCCL takes the closest of them for
        each GPU, and may use those of its peers."""
        if launch.env.get("SHOAL_MEMBERS", "1") == "1" or not (launch.gpus and launch.limits.rdma):
            return {}
        words = launch.env.get(JOB_GPUS, "").split(",")
        gpus = [int(word) for word in words if word.isdecimal()] or launch.gpus
        names = [card.name for card in cards_of(self._tree, gpus)]
        if not names:
            return {}
        return {
            "NCCL_IB_HCA": f"={','.join(names)}",  # "=": these names, not all that begin so
            "UCX_NET_DEVICES": ",".join(f"{name}:1" for name in names),
        }
