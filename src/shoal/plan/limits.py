"""What a little more of each thing would buy: compute, memory, links, network, nodes, batch."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from shoal.plan.hardware import Accelerator, Cluster, Curve
from shoal.plan.impossible import Impossible
from shoal.plan.layout import Stack
from shoal.plan.model import Model
from shoal.plan.search import search
from shoal.plan.step import Estimate, estimate

MORE = 1.1
RATIOS = (1.125, 1.25, 1.5, 2.0)  # of nodes, where a tenth more cannot be shared out


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Ten percent more of one thing."""

    what: str  # compute, memory, memory_bandwidth, link, network, nodes, batch
    words: str
    tokens_s: float  # of the whole cluster, with more of it
    gain: float  # share by which training is faster: 0.1 is in proportion


def what_limits(
    model: Model, cluster: Cluster, found: Estimate, stack: Stack | None = None
) -> list[Gain]:
    """Of each thing ten percent more, the largest gain first. The layout stays the same, except
    that more memory, nodes or batch may make another one the best."""
    chosen = stack or Stack()
    gains = [
        _gain(what, words, found, estimate(model, change(cluster), found.layout, chosen))
        for what, words, change in _CHANGES
    ]
    batch = found.layout.batch
    chip = cluster.accelerator
    roomy = msgspec.structs.replace(
        cluster, accelerator=msgspec.structs.replace(chip, memory_gib=chip.memory_gib * MORE)
    )
    gains.append(_searched("memory", "memory of a GPU", model, roomy, batch, found, chosen))
    gains.append(_more_nodes(model, cluster, batch, found, chosen))
    larger = round(batch * MORE) if batch >= 10 else batch + 1
    more = _searched("batch", "sequences in a batch", model, cluster, larger, found, chosen)
    gains.append(_at_ten_percent(more, found, (MORE - 1) / (larger / batch - 1)))
    return sorted(gains, key=lambda gain: -gain.gain)


def _gain(what: str, words: str, before: Estimate, after: Estimate) -> Gain:
    return Gain(
        what=what,
        words=words,
        tokens_s=after.tokens_s,
        gain=after.tokens_s / before.tokens_s - 1,
    )


def _searched(
    what: str,
    words: str,
    model: Model,
    cluster: Cluster,
    batch: int,
    before: Estimate,
    stack: Stack,
) -> Gain:
    """The best layout with it, against the best without it: a gain is not a better search."""
    try:
        after = search(model, cluster, batch, stack, keep=1).best
    except Impossible:
        return Gain(what=what, words=words, tokens_s=before.tokens_s, gain=0.0)
    return _gain(what, words, before, after if after.tokens_s > before.tokens_s else before)


def _more_nodes(model: Model, cluster: Cluster, batch: int, before: Estimate, stack: Stack) -> Gain:
    """Layouts need numbers with small factors, so several sizes are tried and scaled to a tenth."""
    gains = []
    for nodes in sorted({-(-round(cluster.nodes * 8 * ratio) // 8) for ratio in RATIOS}):
        wider = msgspec.structs.replace(cluster, nodes=max(nodes, cluster.nodes + 1))
        more = _searched("nodes", "nodes, the same batch", model, wider, batch, before, stack)
        scale = (MORE - 1) / (wider.nodes / cluster.nodes - 1)
        gains.append(_at_ten_percent(more, before, scale))
    return max(gains, key=lambda gain: gain.gain)


def _at_ten_percent(gain: Gain, before: Estimate, scale: float) -> Gain:
    share = gain.gain * scale
    return msgspec.structs.replace(gain, gain=share, tokens_s=before.tokens_s * (1 + share))


def _chip(change: Callable[[Accelerator], Accelerator]) -> Callable[[Cluster], Cluster]:
    return lambda cluster: msgspec.structs.replace(cluster, accelerator=change(cluster.accelerator))


def _raised(curve: Curve) -> Curve:
    return tuple((size, rate * MORE) for size, rate in curve)


def _compute(chip: Accelerator) -> Accelerator:
    return msgspec.structs.replace(
        chip,
        peak_tflops={name: rate * MORE for name, rate in chip.peak_tflops.items()},
        matmul_tflops=_raised(chip.matmul_tflops),
    )


def _memory_rate(chip: Accelerator) -> Accelerator:
    return msgspec.structs.replace(
        chip, memory_gbs=chip.memory_gbs * MORE, copy_gbs=chip.copy_gbs * MORE
    )


def _link(cluster: Cluster) -> Cluster:
    chip, node = cluster.accelerator, cluster.node
    return msgspec.structs.replace(
        cluster,
        accelerator=msgspec.structs.replace(chip, link_gbs=chip.link_gbs * MORE),
        node=msgspec.structs.replace(node, link_busbw=_raised(node.link_busbw)),
    )


def _network(cluster: Cluster) -> Cluster:
    node, fabric = cluster.node, cluster.fabric
    return msgspec.structs.replace(
        cluster,
        node=msgspec.structs.replace(node, nic_gbs=node.nic_gbs * MORE),
        fabric=msgspec.structs.replace(fabric, busbw=_raised(fabric.busbw)),
    )


_CHANGES: tuple[tuple[str, str, Callable[[Cluster], Cluster]], ...] = (
    ("compute", "FLOP/s of a GPU", _chip(_compute)),
    ("memory_bandwidth", "memory bandwidth of a GPU", _chip(_memory_rate)),
    ("link", "bandwidth within a node", _link),
    ("network", "bandwidth between nodes", _network),
)
