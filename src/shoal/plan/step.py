"""The time of one training step, from the kernels up, for a model, a layout and a cluster."""

from __future__ import annotations

import msgspec

from shoal.plan import layout as layouts
from shoal.plan.hardware import Accelerator, Cluster, Impossible, read_curve
from shoal.plan.layout import (
    Layout,
    Memory,
    Share,
    Stack,
    ends_are_lighter,
    memory,
    share,
    stage_layers,
)
from shoal.plan.model import Model

# Seconds that one GPU computes: matrix products, attention, and what only moves bytes.


SUSTAINED = 0.88  # of a product alone, inside a step: kernels share power, clocks and caches
LAUNCH_S = 4e-6  # one kernel, when the queue is not empty
DEPTH = 128.0  # inner size that a tile of the result costs beside its products
WAVE = 128 * 256 * 110.0  # elements of a result that all units of a GPU compute at a time
WASTE = 0.25  # share of the last wave that runs empty
BYTES_SHARE = 0.8  # of the memory bandwidth, which kernels reach
UNFUSED = 1.8  # traffic of separate kernels against fused ones
FP8_SHARE = 0.9  # an fp8 product beside its bf16 share: casts and scales
BACKWARD = 2.0  # a product has two in the backward pass: of its input and of its weights
FLASH_BACKWARD = 2.5  # fused attention computes the scores again


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a layer (or of the end of the model) on one GPU, one micro-batch."""

    matmul: float = 0.0
    attention: float = 0.0
    moving: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.moving

    def __add__(self, other: Times) -> Times:
        return Times(
            matmul=self.matmul + other.matmul,
            attention=self.attention + other.attention,
            moving=self.moving + other.moving,
        )

    def times(self, factor: float) -> Times:
        return Times(
            matmul=self.matmul * factor,
            attention=self.attention * factor,
            moving=self.moving * factor,
        )


NOTHING = Times()


def matmul_s(chip: Accelerator, rows: float, inner: float, columns: float, precision: str) -> float:
    """One product: the share of the peak falls with shallow and with small results."""
    flops = 2.0 * rows * inner * columns
    rate = chip.peak(precision) * chip.matmul * SUSTAINED
    if chip.matmul_tflops:  # measured while the GPU was kept busy, so it is sustained already
        rate = read_curve(chip.matmul_tflops, 16_384) * 1e12
        rate *= chip.peak(precision) / chip.peak("bf16")
    if precision == "fp8":
        rate *= FP8_SHARE
    waves = rows * columns / WAVE
    rate *= inner / (inner + DEPTH) * waves / (waves + WASTE)
    width = 1 if precision == "fp8" else 2
    moved = width * (rows * inner + inner * columns) + 2 * rows * columns
    return LAUNCH_S + max(flops / rate, moving_s(chip, moved))


def moving_s(chip: Accelerator, size: float) -> float:
    """Kernels that only move bytes: read plus written."""
    return size / ((chip.copy_gbs or chip.memory_gbs * BYTES_SHARE) * 1e9)


class Layer:
    """The kernels of one layer on one GPU, for one micro-batch."""

    def __init__(
        self, model: Model, layout: Layout, stack: Stack, chip: Accelerator, *, sparse: bool = False
    ) -> None:
        self.model, self.layout, self.stack, self.chip = model, layout, stack, chip
        self.sparse = sparse
        self.tokens = layout.micro_batch * model.sequence / layout.context

    def forward(self) -> Times:
        return self._linear(1.0) + self.core(1.0, 1.0)

    def backward(self) -> Times:
        return self._linear(BACKWARD) + self.core(BACKWARD, FLASH_BACKWARD)

    def again(self) -> Times:
        """What recomputation adds."""
        if self.layout.recompute == "full":
            return self.forward()
        if self.layout.recompute == "selective" and not self.stack.flash:
            return self.core(1.0, 1.0)
        return NOTHING

    def _products(self) -> list[tuple[float, float, float, float]]:
        """(how many, rows, inner, columns) of the forward pass."""
        model, parts, rows = self.model, self.layout.tensor, self.tokens
        attention = model.attention_width
        inner = model.attention_weights() / model.hidden - attention  # of queries, keys, values
        products = [
            (1.0, rows, float(model.hidden), inner / parts),
            (1.0, rows, attention / parts, float(model.hidden)),
        ]
        wide = 2 if model.gated_ffn else 1
        if not self.sparse:
            size = model.ffn_size / parts
            return [
                *products,
                (1.0, rows, float(model.hidden), wide * size),
                (1.0, rows, size, float(model.hidden)),
            ]
        local = model.experts / self.layout.expert
        routed = rows * model.experts_active / local
        size = model.expert_size / (1 if self.layout.data % self.layout.expert else parts)
        kinds = [(local, routed)]
        if model.shared_experts:
            kinds.append((float(model.shared_experts), rows))
        for many, batch in kinds:
            products.append((many, batch, float(model.hidden), wide * size))
            products.append((many, batch, size, float(model.hidden)))
        return products

    def _linear(self, passes: float) -> Times:
        seconds = 0.0
        for many, rows, inner, columns in self._products():
            if passes == 1.0:
                seconds += many * matmul_s(self.chip, rows, inner, columns, self.stack.precision)
            else:
                precision = self.stack.precision
                seconds += many * matmul_s(self.chip, rows, columns, inner, precision)
                seconds += many * matmul_s(self.chip, inner, rows, columns, precision)
        return Times(matmul=seconds, moving=passes * self._moved())

    def _moved(self) -> float:
        """Norms, residual sums and activation functions, forward."""
        model, parts = self.model, self.layout.tensor
        common = (4.0 if model.parallel else 8.0) * model.hidden + 12.0 * model.hidden
        if self.layout.sequence_parallel:
            common /= parts
        rotary = 4.0 * (model.attention_width + model.kv_width) / parts
        activation = 6.0 if model.gated_ffn else 4.0
        if self.sparse:
            active = model.experts_active + model.shared_experts
            split = active * (activation * model.expert_size / parts + 8.0 * model.hidden)
        else:
            split = activation * model.ffn_size / parts
        size = self.tokens * (common + rotary + split)
        return moving_s(self.chip, size * (1.0 if self.stack.fused else UNFUSED))

    def core(self, passes: float, flash_passes: float) -> Times:
        """Scores, softmax and the weighted sum: what selective recomputation repeats."""
        model, parts, chip = self.model, self.layout.tensor, self.chip
        flops = self.tokens * model.attention_flops() / parts
        if self.stack.flash:  # half of the square is never computed
            return Times(attention=flash_passes * flops / 2 / (chip.peak("bf16") * chip.flash))
        scores = self.tokens * model.heads * model.sequence / parts
        rate = chip.peak("bf16") * chip.matmul * SUSTAINED
        shallow = model.head_size / (model.head_size + DEPTH)
        stored = moving_s(chip, 2.0 * scores)  # scores are written by one product, read by another
        products = max(flops / 2 / (rate * shallow), stored) + max(flops / 2 / rate, stored)
        between = moving_s(chip, 9.0 * scores)  # softmax, dropout and its mask
        seconds = products + between * (1.0 if self.stack.fused else UNFUSED)
        return Times(attention=passes * seconds)


def ends(model: Model, layout: Layout, stack: Stack, chip: Accelerator) -> Times:
    """The output matrix and the loss, forward and backward, of one micro-batch."""
    tokens = layout.micro_batch * model.sequence / layout.context
    columns = model.vocab / layout.tensor
    products = matmul_s(chip, tokens, model.hidden, columns, "bf16")
    products += matmul_s(chip, tokens, columns, model.hidden, "bf16")
    products += matmul_s(chip, model.hidden, tokens, columns, "bf16")
    moved = 24.0 * tokens * columns * (1.0 if stack.fused else UNFUSED)
    return Times(matmul=products, moving=moving_s(chip, moved))


def optimizer_s(chip: Accelerator, mine: float, sharded: float) -> float:
    """Adam: every state of the shard is read and written; all gradients are cleared and summed."""
    return moving_s(chip, 30.0 * sharded + 8.0 * mine)


HIDDEN_SHARE = 0.9  # of the time that could hide a transfer, which does
CONTENTION = 0.1  # a transfer that hides still takes units and bandwidth from what computes
HIDDEN_TENSOR = 0.6  # of a tensor group's collectives, when products are cut into pieces
OTHER_SHARE = 0.04  # gaps between kernels, clipping, logging, the slowest of many GPUs


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, on the slowest stage. Their sum is the step."""

    matmul: float
    attention: float
    moving: float  # norms, activations: kernels bound by memory bandwidth
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float  # transfers between stages that nothing hides
    bubble: float  # the pipeline fills and drains
    data: float  # gradients and weights between replicas, as far as nothing hides them
    optimizer: float
    other: float

    @property
    def total(self) -> float:
        return float(sum(msgspec.structs.astuple(self)))


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of this layout takes."""

    layout: Layout
    step_s: float
    parts: Parts
    mfu: float  # model FLOPs over the peak of the precision
    tflops: float  # model FLOPs of one GPU, per second, in 10^12
    tokens_s: float  # of the whole cluster
    memory: Memory
    fits: bool
    network_bytes: float  # sent by one GPU to other nodes in a step


# What of a layout the kernels of a layer depend on. A search computes them once for each.
KERNELS = (
    "data", "tensor", "context", "expert", "micro_batch", "recompute", "sequence_parallel",
)  # fmt: skip
Known = dict[tuple[object, ...], tuple[Times, Times, Times, Times]]


class Clock:
    """All that one micro-batch costs on one stage."""

    def __init__(
        self, model: Model, cluster: Cluster, layout: Layout, stack: Stack, known: Known
    ) -> None:
        self.model, self.cluster, self.layout, self.stack = model, cluster, layout, stack
        self.layers = stage_layers(model, layout)
        self.sparse = model.expert_layers / model.layers
        self.tokens = layout.micro_batch * model.sequence / layout.context
        shape = tuple(getattr(layout, name) for name in KERNELS)
        if shape not in known:
            known[shape] = (*self._mixed(), ends(model, layout, stack, cluster.accelerator))
        self.forward, self.backward, self.again, self.end = known[shape]
        tensor, context = layout.tensor, layout.context
        self.tensor_group = Group(cluster, tensor, 1)
        self.context_group = Group(cluster, context, tensor)
        self.data_group = Group(cluster, layout.data * context, tensor)
        self.expert_group = Group(cluster, layout.expert, 1 if self._wide_experts() else tensor)
        self.pipeline_group = Group(cluster, layout.pipeline, tensor * context * layout.data)

    def _wide_experts(self) -> bool:
        return self.layout.data * self.layout.context % self.layout.expert > 0

    def _mixed(self) -> tuple[Times, Times, Times]:
        """Of an average layer."""
        dense = Layer(self.model, self.layout, self.stack, self.cluster.accelerator)
        times = (dense.forward(), dense.backward(), dense.again())
        if not self.sparse:
            return times
        experts = Layer(self.model, self.layout, self.stack, self.cluster.accelerator, sparse=True)
        others = (experts.forward(), experts.backward(), experts.again())
        mixed = [
            one.times(1 - self.sparse) + other.times(self.sparse)
            for one, other in zip(times, others, strict=True)
        ]
        return mixed[0], mixed[1], mixed[2]

    # -- exposed communication of one layer and micro-batch, forward plus backward

    def tensor_s(self) -> float:
        blocks = 1 if self.model.parallel else 2
        passes = 3 if self.layout.recompute == "full" else 2
        size = 2.0 * self.tokens * self.model.hidden
        exposed = 1 - HIDDEN_TENSOR if self.stack.overlap_tensor else 1.0
        return blocks * passes * self.tensor_group.reduce(size) * exposed

    def context_s(self) -> float:
        """Keys and values are gathered, and their gradients scattered."""
        if self.layout.context == 1:
            return 0.0
        width = 2 * self.model.kv_width / self.layout.tensor
        if self.model.kv_rank:
            width = float(self.model.kv_rank + self.model.rope_head)
        size = 2.0 * self.tokens * self.layout.context * width
        passes = 3 if self.layout.recompute == "full" else 2
        return passes * self.context_group.gather(size)

    def expert_s(self) -> float:
        """Tokens travel to their experts and back, in both passes."""
        if self.layout.expert == 1 or not self.sparse:
            return 0.0
        copies = self.model.experts_active
        if self.model.expert_nodes:
            copies = min(copies, self.model.expert_nodes)
        size = self.tokens * self.model.hidden * copies
        there = self.expert_group.exchange(size * (1 if self.stack.precision == "fp8" else 2))
        back = self.expert_group.exchange(size * 2)
        exposed = 2 * (there + back) * self.sparse
        if self.stack.overlap_expert:
            work = self.forward.total + self.backward.total
            return max(0.0, exposed - HIDDEN_SHARE * work) + CONTENTION * min(exposed, work)
        return exposed

    def send_s(self) -> float:
        """Between stages, forward and backward, of one micro-batch through one rank."""
        layout = self.layout
        if layout.pipeline == 1:
            return 0.0
        size = 2.0 * self.tokens * self.model.hidden / layout.tensor
        once = self.pipeline_group.send(size)
        sends = 2.0 * layout.interleave * once
        return sends * (CONTENTION if self.stack.overlap_pipeline else 1.0)

    # -- once per step

    def data_s(self, mine: Share, compute: float) -> float:
        """Gradients, and weights under ZeRO, as far as nothing hides them."""
        layout, group = self.layout, self.data_group
        grads = self.stack.gradient_bytes * (mine.dense + mine.ends)
        weights = 2.0 * (mine.dense + mine.ends)
        experts = Group(self.cluster, mine.expert_group, max(1, layout.expert * layout.tensor))
        if layout.zero == 3:
            rounds = layout.micro_batches
            once = 2 * group.gather(weights) + group.gather(grads)
            once += 2 * experts.gather(2.0 * mine.experts)
            once += experts.gather(self.stack.gradient_bytes * mine.experts)
            transfer, window = rounds * once, compute
        else:
            expert_grads = self.stack.gradient_bytes * mine.experts
            if layout.zero == 0:
                transfer = group.reduce(grads) + experts.reduce(expert_grads)
            else:
                rounds = layout.micro_batches if layout.zero == 2 else 1  # no room to accumulate
                transfer = rounds * (group.gather(grads) + experts.gather(expert_grads))
                transfer += group.gather(weights) + experts.gather(2.0 * mine.experts)
            window = compute if layout.zero == 2 else compute / layout.micro_batches
        if not self.stack.overlap_data:
            return transfer
        hidden = min(transfer, HIDDEN_SHARE * window)
        return transfer - hidden + CONTENTION * hidden


def estimate(
    model: Model, cluster: Cluster, layout: Layout, stack: Stack | None = None
) -> Estimate:
    """The step of this layout. It is computed even if the memory does not suffice: see `fits`."""
    model.check()
    cluster.check()
    layouts.check(model, layout, cluster)
    return quick(model, cluster, layout, stack or Stack())


def quick(
    model: Model, cluster: Cluster, layout: Layout, stack: Stack, known: Known | None = None
) -> Estimate:
    """The same, of what has been checked. `known` saves work between layouts of one search."""
    return _estimate(Clock(model, cluster, layout, stack, {} if known is None else known))


def _estimate(clock: Clock) -> Estimate:
    model, layout, cluster = clock.model, clock.layout, clock.cluster
    mine, many, layers = share(model, layout), layout.micro_batches, clock.layers
    work = (clock.forward + clock.backward).times(layers)
    again = clock.again.total * layers
    comms = (clock.tensor_s() * layers, clock.context_s() * layers, clock.expert_s() * layers)
    end = clock.end.times(_end_share(clock, work.total + again + sum(comms)))
    sends = clock.send_s()
    slot = work.total + again + sum(comms) + end.total + sends
    bubble = (layout.pipeline - 1) / layout.interleave * (slot - end.total)
    optimizer = optimizer_s(cluster.accelerator, mine.total, _sharded(layout, mine))
    data = clock.data_s(mine, many * (work.total + again))
    parts = [
        many * (work.matmul + end.matmul),
        many * work.attention,
        many * (work.moving + end.moving),
        many * again,
        *(many * seconds for seconds in comms),
        many * sends,
        bubble,
        data,
        optimizer,
    ]
    named = Parts(
        **dict(zip(Parts.__struct_fields__, [*parts, OTHER_SHARE * sum(parts)], strict=True))
    )
    step = named.total
    if not 0 < step < float("inf"):
        raise Impossible(
            f"the step of {model.name} would take {step:g} s: check the hardware figures"
        )
    flops = model.flops_per_token() * layout.batch * model.sequence
    rate = flops / step / layout.gpus
    used = memory(model, layout, clock.stack)
    return Estimate(
        layout=layout,
        step_s=step,
        parts=named,
        mfu=rate / cluster.accelerator.peak("bf16"),
        tflops=rate / 1e12,
        tokens_s=layout.batch * model.sequence / step,
        memory=used,
        fits=used.total <= cluster.accelerator.memory_bytes,
        network_bytes=_outside(clock, mine),
    )


def _end_share(clock: Clock, stage: float) -> float:
    """How much of the output matrix and the loss the slowest stage feels."""
    if clock.layout.pipeline == 1:
        return 1.0
    room = stage / clock.layers if ends_are_lighter(clock.model, clock.layout) else 0.0
    return max(0.0, clock.end.total - room) / clock.end.total


def _sharded(layout: Layout, mine: Share) -> float:
    """Parameters whose optimizer states this GPU updates."""
    if layout.zero == 0:
        return mine.total
    return (mine.dense + mine.ends) / mine.dense_group + mine.experts / mine.expert_group


def _outside(clock: Clock, mine: Share) -> float:
    """Bytes that a GPU sends to other nodes in a step: what the fabric has to carry."""
    layout, total = clock.layout, 0.0
    if not clock.data_group.within_node:
        grads = (clock.stack.gradient_bytes + 2.0) * mine.total
        total += grads * (layout.micro_batches * 1.5 if layout.zero == 3 else 1.0)
        total /= clock.data_group.inside
    if layout.pipeline > 1 and not clock.pipeline_group.within_node:
        size = 2.0 * clock.tokens * clock.model.hidden / layout.tensor
        total += 2.0 * layout.interleave * layout.micro_batches * size
    if layout.expert > 1 and not clock.expert_group.within_node:
        size = clock.tokens * clock.model.hidden * clock.model.experts_active * 2
        total += 4.0 * size * clock.layers * layout.micro_batches * clock.sparse
    return total


# Seconds that collectives take, from where the members of a group lie.


LINK_SHARE = 0.8  # of NVLink, which a large collective reaches within a node
LINK_LATENCY_S = 2e-6  # one hop within a node
START_S = 8e-6  # one collective, before its first byte
LEAF_NODES = 32  # nodes below one group of leaf switches: beyond it, oversubscription counts


class Group:
    """GPUs that talk to each other: how many, and how far apart their neighbors lie."""

    def __init__(self, cluster: Cluster, members: int, stride: int) -> None:
        """`stride`: neighbors of the group are that many GPUs apart."""
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
