"""What a cluster is made of: accelerators, nodes and the fabric between them, from a data file."""

from __future__ import annotations

import itertools

import msgspec

from shoal.model.fabric import Collective

GIB = 2**30
GPUS_MAX = 10_000_000

Curve = tuple[tuple[float, float], ...]  # (size, rate), sizes rising


class Accelerator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU or TPU chip. Rates are dense (no sparsity) and in one direction."""

    name: str = ""
    peak_tflops: dict[str, float]  # by precision: bf16, fp16, fp8
    memory_gib: float
    memory_gbs: float
    link_gbs: float  # to the others of its node, in one direction (NVLink, xGMI, ICI, PCIe)
    power_w: float
    price_hour: float = 0.0  # US dollars per GPU and hour, with its share of the node
    matmul: float = 0.75  # share of the peak that a large matrix product reaches
    flash: float = 0.5  # share of the peak that fused attention reaches, forward and backward
    year: int = 0
    source: str = ""
    # Measured by `shoal check`. Where present, they replace the shares above.
    matmul_tflops: Curve = ()  # (n, TFLOP/s) of n x n x n products in bf16
    copy_gbs: float = 0.0  # bytes read plus bytes written, per second, of a large copy

    def peak(self, precision: str) -> float:
        """FLOP/s at this precision."""
        if precision in self.peak_tflops:
            return self.peak_tflops[precision] * 1e12
        if precision == "bf16" and "fp16" in self.peak_tflops:  # V100 has no bf16
            return self.peak_tflops["fp16"] * 1e12
        raise Impossible(
            f"{self.name} has no {precision}: use one of {', '.join(sorted(self.peak_tflops))}"
        )

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB


class NodeKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine: its accelerators and its share of the network."""

    name: str = ""
    accelerator: str
    gpus: int
    nic_gbs: float  # network of one GPU, in one direction: the node's NICs over its GPUs
    power_w: float = 0.0  # of the node, beside its accelerators
    source: str = ""
    link_busbw: Curve = ()  # measured: (bytes, GB/s) of an all-reduce within a node


class Fabric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The network between nodes."""

    name: str = "fabric"
    latency_us: float = 5.0  # of one message between nodes
    oversubscription: float = 1.0  # of the layers above the leaf switches: 2 halves bisection
    efficiency: float = 0.8  # share of the line rate that a large collective reaches
    busbw: Curve = ()  # measured: (bytes, GB/s) of an all-reduce between nodes, per GPU
    source: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Equal nodes on one fabric."""

    accelerator: Accelerator
    node: NodeKind
    fabric: Fabric
    nodes: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.node.gpus

    def of(self, gpus: int) -> Cluster:
        """With so many GPUs: whole nodes, or one of which only a part is used."""
        node = self.node
        if gpus >= node.gpus and gpus % node.gpus == 0:
            return msgspec.structs.replace(self, nodes=gpus // node.gpus)
        if gpus > node.gpus:
            near = gpus // node.gpus * node.gpus
            raise Impossible(
                f"{gpus} GPUs are not whole nodes: {node.name} has {node.gpus}; "
                f"use {near} or {near + node.gpus}"
            )
        power_w = node.power_w * gpus / node.gpus
        part = msgspec.structs.replace(node, gpus=gpus, power_w=power_w)
        return msgspec.structs.replace(self, node=part, nodes=1)

    def check(self) -> Cluster:
        """This cluster, or a sentence about the first figure that cannot be."""
        chip, node, fabric = self.accelerator, self.node, self.fabric
        at_least("nodes", self.nodes, 1)
        at_least(f"node {node.name}: gpus", node.gpus, 1)
        at_most("GPUs", self.gpus, GPUS_MAX)
        for name, value, most in (
            ("memory_gib", chip.memory_gib, 1e6),
            ("memory_gbs", chip.memory_gbs, 1e7),
            ("link_gbs", chip.link_gbs, 1e6),
            *((f"peak_tflops.{name}", value, 1e7) for name, value in chip.peak_tflops.items()),
        ):
            _positive(f"accelerator {chip.name}: {name}", value, most)
        for name, value in (("matmul", chip.matmul), ("flash", chip.flash)):
            _positive(f"accelerator {chip.name}: {name}", value, 1)
        _positive(f"node {node.name}: nic_gbs", node.nic_gbs, 1e6)
        _positive(f"fabric {fabric.name}: efficiency", fabric.efficiency, 1)
        _rising(f"accelerator {chip.name}: matmul_tflops", chip.matmul_tflops)
        _rising(f"node {node.name}: link_busbw", node.link_busbw)
        _rising(f"fabric {fabric.name}: busbw", fabric.busbw)
        at_least(f"accelerator {chip.name}: copy_gbs", chip.copy_gbs, 0)
        at_least(f"fabric {fabric.name}: latency_us", fabric.latency_us, 0)
        at_least(f"fabric {fabric.name}: oversubscription", fabric.oversubscription, 1)
        return self


def _positive(name: str, value: float, most: float) -> None:
    if not value > 0:
        raise Impossible(f"{name} is {value:g}: it must be more than 0")
    at_most(name, value, most)


def _rising(name: str, curve: Curve) -> None:
    """Sizes of a measured curve rise, and its rates are positive."""
    for (small, _), (large, _) in itertools.pairwise(curve):
        if not large > small:
            raise Impossible(f"{name}: size {large:g} comes after {small:g}: sizes must rise")
    for size, rate in curve:
        _positive(f"{name}: the rate at size {size:g}", rate, 1e7)


def read_curve(curve: Curve, size: float) -> float:
    """The rate at this size: between two measured sizes in proportion, beyond them the nearest."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (small, low), (large, high) in itertools.pairwise(curve):
        if size <= large:
            return low + (high - low) * (size - small) / (large - small)
    return curve[-1][1]


# The one error of planning: a sentence that says what cannot be, and what would work.


class Impossible(ValueError):
    """The question has no answer: a layout, a model or a number that cannot be."""


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # also catches NaN
        raise Impossible(f"{name} is {value:g}: it must be at least {least:g}")


def at_most(name: str, value: float, most: float) -> None:
    if not value <= most:
        raise Impossible(f"{name} is {value:g}: the most that a plan accepts is {most:g}")


# What `shoal check --save` measured of a machine's GPUs, for a hardware file of `shoal plan`.


class Measured(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one GPU, if not said otherwise. Rates of memory are GB/s, of products TFLOP/s."""

    gpu: str  # as its driver calls it
    gpus: int
    memory_gib: float
    power_w: float = 0.0
    matmul_tflops: dict[str, Curve] = {}  # by precision: n x n x n products
    flash_tflops: float = 0.0  # fused causal attention, forward and backward
    copy_gbs: float = 0.0  # within its memory, read plus written
    up_gbs: float = 0.0  # from the host
    down_gbs: float = 0.0
    collectives: tuple[Collective, ...] = ()  # among the GPUs of this machine
    notes: tuple[str, ...] = ()
