"""Seconds that collectives take, from where the members of a group lie."""

from __future__ import annotations

from shoal.plan.hardware import Cluster, read_curve

LINK_SHARE = 0.8  # of NVLink, which a large collective reaches within a node
LINK_LATENCY_S = 2e-6  # one hop within a node
START_S = 8e-6  # one collective, before its first byte
LEAF_NODES = 32  # nodes below one group of leaf switches: beyond it, oversubscription counts


class Group:
    """GPUs that talk to each other: how many, and how far apart their neighbours lie."""

    def __init__(self, cluster: Cluster, members: int, stride: int) -> None:
        """`stride`: neighbours of the group are that many GPUs apart."""
        self.cluster, self.members = cluster, members
        per_node = cluster.node.gpus
        self.inside = max(1, min(members, per_node // stride if stride < per_node else 1))
        self.nodes = -(-members // self.inside)

    @property
    def within_node(self) -> bool:
        return self.nodes == 1

    def rate(self, size: float) -> float:
        """Bus bandwidth in bytes per second, for a collective over `size` bytes."""
        node, fabric = self.cluster.node, self.cluster.fabric
        link = self.cluster.accelerator.link_gbs * LINK_SHARE
        if node.link_busbw:
            link = read_curve(node.link_busbw, size)
        if self.within_node:
            return link * 1e9
        wire = node.nic_gbs * fabric.efficiency
        if self.nodes > LEAF_NODES:
            wire /= fabric.oversubscription
        if fabric.busbw:
            wire = read_curve(fabric.busbw, size)
        return min(link, wire * self.inside) * 1e9  # each member inside a node brings its own NIC

    def latency(self) -> float:
        """Of one pass around the group. Trees and rails keep it from growing with every node."""
        inside = (self.inside - 1) * LINK_LATENCY_S
        hops = (self.nodes - 1).bit_length() * 2
        return START_S + inside + hops * self.cluster.fabric.latency_us * 1e-6

    def gather(self, size: float) -> float:
        """All-gather or reduce-scatter: `size` is the whole."""
        if self.members == 1:
            return 0.0
        share = (self.members - 1) / self.members
        return self.latency() + share * size / self.rate(size)

    def reduce(self, size: float) -> float:
        """All-reduce."""
        return 2 * self.gather(size) if self.members > 1 else 0.0

    def exchange(self, size: float) -> float:
        """All-to-all: `size` is what one member holds for all others."""
        if self.members == 1:
            return 0.0
        node, fabric = self.cluster.node, self.cluster.fabric
        link = self.cluster.accelerator.link_gbs * LINK_SHARE * 1e9
        outside = (self.members - self.inside) / self.members
        inside = (self.inside - 1) / self.members
        wire = node.nic_gbs * fabric.efficiency * 1e9
        if self.nodes > LEAF_NODES:
            wire /= fabric.oversubscription
        return self.latency() + max(size * outside / wire, size * inside / link)

    def send(self, size: float) -> float:
        """From one member to the next."""
        if self.members == 1:
            return 0.0
        if self.within_node:
            return LINK_LATENCY_S + size / self.rate(size)
        node, fabric = self.cluster.node, self.cluster.fabric
        return fabric.latency_us * 1e-6 + size / (node.nic_gbs * fabric.efficiency * 1e9)
