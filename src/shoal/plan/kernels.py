"""Seconds that one GPU computes: matrix products, attention, and what only moves bytes."""

from __future__ import annotations

import msgspec

from shoal.plan.hardware import Accelerator, read_curve
from shoal.plan.layout import Layout, Stack
from shoal.plan.model import Model

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
        for many, share in kinds:
            products.append((many, share, float(model.hidden), wide * size))
            products.append((many, share, size, float(model.hidden)))
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
