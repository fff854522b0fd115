"""How a model is spread over GPUs, what the fullest holds, and why a layout cannot be."""

from __future__ import annotations

from typing import Literal

import msgspec

from shoal.plan.hardware import GIB, Cluster, Impossible
from shoal.plan.model import Model

Recompute = Literal["none", "selective", "full"]
SIZES = ("data", "tensor", "pipeline", "context", "expert", "micro_batch", "micro_batches")


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Degrees of parallelism. GPUs = data x tensor x pipeline x context; experts lie within."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1  # sequences
    micro_batches: int = 1  # of one step, through each pipeline
    interleave: int = 1  # stages of the model on each pipeline rank
    zero: int = 1  # 0: DDP, 1: optimizer sharded, 2: gradients too, 3: weights too (FSDP)
    recompute: Recompute = "selective"
    sequence_parallel: bool = True  # norms and dropouts are split among the tensor group

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def batch(self) -> int:
        """Sequences of one step."""
        return self.data * self.micro_batch * self.micro_batches

    def words(self) -> str:
        """In one line: `data 16 x tensor 8 x pipeline 4, ZeRO-1, selective recompute`."""
        kinds = ("data", "tensor", "pipeline", "context")
        sizes = [f"{kind} {getattr(self, kind)}" for kind in kinds if getattr(self, kind) > 1]
        parts = [" x ".join(sizes) or "one GPU"]
        if self.expert > 1:
            parts.append(f"expert {self.expert}")
        if self.interleave > 1:
            parts.append(f"interleave {self.interleave}")
        parts.append("DDP" if self.zero == 0 else f"ZeRO-{self.zero}")
        parts.append(f"micro-batch {self.micro_batch} x {self.micro_batches}")
        parts.append(f"{self.recompute} recompute" if self.recompute != "none" else "no recompute")
        return ", ".join(parts)


class Stack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the training software does: a modern stack unless said otherwise."""

    precision: str = "bf16"  # of the matrix products
    flash: bool = True  # fused attention: scores are never stored
    fused: bool = True  # fused norms, activations, softmax
    overlap_data: bool = True  # gradients and weights travel while others compute
    overlap_tensor: bool = False  # collectives of the tensor group hide behind products
    overlap_pipeline: bool = True  # activations travel between stages while others compute
    overlap_expert: bool = False  # all-to-all hides behind the other half of the batch (DualPipe)
    gradient_bytes: int = 4  # of one gradient while it accumulates and travels


def problem(model: Model, layout: Layout, cluster: Cluster | None = None) -> str:
    """Why this layout cannot be, in one sentence; empty if it can."""
    for name in (*SIZES, "interleave"):
        if getattr(layout, name) < 1:
            return f"{name} is {getattr(layout, name)}: it must be at least 1"
    if layout.zero not in (0, 1, 2, 3):
        return f"zero is {layout.zero}: it must be 0, 1, 2 or 3"
    if layout.recompute not in ("none", "selective", "full"):
        return f"recompute is {layout.recompute!r}: use none, selective or full"
    if cluster is not None and layout.gpus != cluster.gpus:
        return (
            f"the layout is for {layout.gpus} GPUs (data {layout.data} x tensor {layout.tensor} x "
            f"pipeline {layout.pipeline} x context {layout.context}), but the cluster has "
            f"{cluster.gpus}"
        )
    return _split_problem(model, layout) or _pipeline_problem(model, layout)


def _split_problem(model: Model, layout: Layout) -> str:
    tensor, context, expert = layout.tensor, layout.context, layout.expert
    if model.heads % tensor:
        return f"tensor {tensor} does not divide the {model.heads} heads of {model.name}"
    if model.ffn_size % tensor:
        return f"tensor {tensor} does not divide the feed-forward size {model.ffn_size}"
    if model.sequence % context:
        return f"context {context} does not divide the sequence of {model.sequence} tokens"
    if layout.sequence_parallel and model.sequence // context % tensor:
        return (
            f"tensor {tensor} does not divide the {model.sequence // context} tokens of a context "
            "part, which sequence parallelism needs"
        )
    if expert > 1 and not model.experts:
        return f"expert {expert} needs a model with experts, and {model.name} is dense"
    if expert > 1 and model.experts % expert:
        return f"expert {expert} does not divide the {model.experts} experts of {model.name}"
    if (layout.data * context * tensor) % expert:
        return (
            f"expert {expert} does not divide data x context x tensor, "
            f"{layout.data * context * tensor}: experts lie inside them"
        )
    return ""


def _pipeline_problem(model: Model, layout: Layout) -> str:
    pipeline, chunks = layout.pipeline, layout.pipeline * layout.interleave
    if pipeline > model.layers:
        return f"pipeline {pipeline} has more stages than {model.name} has layers ({model.layers})"
    if layout.interleave == 1:
        return ""
    if pipeline == 1:
        return f"interleave {layout.interleave} needs a pipeline of at least 2 stages"
    if model.layers % chunks and (model.layers + 2) % chunks:
        return (
            f"pipeline {pipeline} x interleave {layout.interleave} does not divide the "
            f"{model.layers} layers of {model.name} (nor {model.layers + 2}, with the embeddings "
            "counted as layers)"
        )
    if layout.micro_batches % pipeline and layout.micro_batches > pipeline:
        return (
            f"interleave needs micro_batches ({layout.micro_batches}) to be a multiple of pipeline "
            f"({pipeline})"
        )
    return ""


def check(model: Model, layout: Layout, cluster: Cluster | None = None) -> Layout:
    if trouble := problem(model, layout, cluster):
        raise Impossible(trouble)
    return layout


# Bytes on the fullest GPU: weights, gradients, optimizer, activations, buffers.


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
