"""Bytes on the fullest GPU: weights, gradients, optimizer, activations, buffers."""

from __future__ import annotations

import msgspec

from shoal.plan.hardware import GIB
from shoal.plan.layout import Layout, Stack
from shoal.plan.model import Model

WEIGHT_BYTES = 2
OPTIMIZER_BYTES = 12  # Adam in mixed precision: a copy of the weight and two moments, in fp32
RESERVED = 2 * GIB  # the driver's context, NCCL's buffers, the framework
FRAGMENTS = 0.04  # of everything else: what the allocator cannot use


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the fullest GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float  # gathered weights, and the reserve
    reserve: float = 0.0  # the driver, NCCL, fragments: a part of the buffers

    @property
    def total(self) -> float:
        kept = self.weights + self.gradients + self.optimizer
        return kept + self.activations + self.logits + self.buffers


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one GPU, before ZeRO splits them."""

    dense: float  # in layers, without routed experts
    experts: float
    ends: float  # embeddings and output matrix, on the fullest stage
    layer: float  # the largest layer: what ZeRO-3 gathers at a time
    dense_group: int  # GPUs that hold the same dense weights
    expert_group: int

    @property
    def total(self) -> float:
        return self.dense + self.experts + self.ends


def stage_layers(model: Model, layout: Layout) -> float:
    """Layers of the fullest stage. If the embeddings count as layers, the ends hold one less."""
    chunks = layout.pipeline * layout.interleave
    if layout.pipeline == 1 or model.layers % chunks == 0:
        return model.layers / layout.pipeline
    if (model.layers + 2) % chunks == 0:
        return (model.layers + 2) / layout.pipeline
    return float(-(-model.layers // layout.pipeline))


def ends_are_lighter(model: Model, layout: Layout) -> bool:
    """The first and the last stage have a layer less, to make up for the embeddings."""
    chunks = layout.pipeline * layout.interleave
    return layout.pipeline > 1 and model.layers % chunks > 0 and (model.layers + 2) % chunks == 0


def share(model: Model, layout: Layout) -> Share:
    layers = stage_layers(model, layout)
    sparse = layers * model.expert_layers / model.layers
    tensor = layout.tensor
    dense_layer = model.layer_parameters() / tensor
    sparse_layer = model.expert_layer_parameters() / tensor
    expert_tensor = 1 if layout.data * layout.context % layout.expert else tensor
    experts = model.experts * model.expert_weights() / (layout.expert * expert_tensor)
    first, last = model.embedding_parameters(), model.output_parameters()
    if layout.pipeline > 1 and model.tied:
        last += model.vocab * model.hidden  # each end keeps its own copy
    ends = (first + last if layout.pipeline == 1 else max(first, last)) / tensor
    group = layout.data * layout.context
    return Share(
        dense=(layers - sparse) * dense_layer + sparse * sparse_layer,
        experts=sparse * experts,
        ends=ends,
        layer=max(dense_layer, sparse_layer + experts if model.experts else 0.0),
        dense_group=group,
        expert_group=max(1, group * tensor // (layout.expert * expert_tensor)),
    )


def activation_bytes(model: Model, layout: Layout, stack: Stack) -> float:
    """One layer's activations of one micro-batch, kept for the backward pass."""
    tokens = layout.micro_batch * model.sequence / layout.context
    small = 1.0 if stack.precision == "fp8" else 2.0  # inputs of products are kept as they are used
    common = (4.0 + 2 * small) * model.hidden  # inputs of norms and of products
    if not stack.flash:
        common += 2.0 * model.hidden  # masks: stacks before fused attention trained with dropout
    split = (2.0 + small) * model.attention_width + 4.0 * model.kv_width
    split += _ffn_bytes(model, small)
    if not stack.flash and layout.recompute == "none":
        split += 5.0 * model.heads * model.sequence
    if not layout.sequence_parallel:
        return tokens * (common + split / layout.tensor)
    return tokens * (common + split) / layout.tensor


def _ffn_bytes(model: Model, small: float) -> float:
    kept = (4.0 if model.gated_ffn else 2.0) + small
    if not model.experts:
        return kept * model.ffn_size
    active = model.experts_active + model.shared_experts
    sparse = active * (kept * model.expert_size + small * model.hidden)
    dense = model.layers - model.expert_layers
    return (dense * kept * model.ffn_size + model.expert_layers * sparse) / model.layers


def _in_flight(layout: Layout) -> float:
    """Micro-batches whose activations the first stage holds at a time (1F1B)."""
    stages, chunks = layout.pipeline, layout.interleave
    held = float(stages)
    if chunks > 1:
        held *= 1 + (stages - 1) / (stages * chunks)
    return min(held, float(layout.micro_batches))


def memory(model: Model, layout: Layout, stack: Stack) -> Memory:
    mine = share(model, layout)
    dense, experts = mine.dense + mine.ends, mine.experts

    def kept(size: float, from_stage: int) -> float:
        if layout.zero < from_stage:
            return size * (dense + experts)
        return size * (dense / mine.dense_group + experts / mine.expert_group)

    layers = stage_layers(model, layout)
    tokens = layout.micro_batch * model.sequence / layout.context
    one = activation_bytes(model, layout, stack)
    if layout.recompute == "full":
        parts = layout.tensor if layout.sequence_parallel else 1
        inputs = 2.0 * tokens * model.hidden / parts
        activations = _in_flight(layout) * layers * inputs + one
    else:
        activations = _in_flight(layout) * layers * one
    logits = 6.0 * tokens * model.vocab / layout.tensor  # in bf16, and in fp32 for the loss
    if layout.pipeline > 1:  # the last stage holds few activations, the first no logits
        logits = max(0.0, logits - activations * (1 - 1 / _in_flight(layout)))
    weights, gradients = kept(WEIGHT_BYTES, 3), kept(stack.gradient_bytes, 2)
    optimizer = kept(OPTIMIZER_BYTES, 1)
    buffers = 2.0 * WEIGHT_BYTES * mine.layer if layout.zero == 3 else 0.0
    used = weights + gradients + optimizer + activations + logits + buffers
    reserve = RESERVED + FRAGMENTS * used
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        logits=logits,
        buffers=buffers + reserve,
        reserve=reserve,
    )
