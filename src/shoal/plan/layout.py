"""How a model is spread over GPUs, and why a layout cannot be."""

from __future__ import annotations

from typing import Literal

import msgspec

from shoal.plan.hardware import Cluster
from shoal.plan.impossible import Impossible
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
