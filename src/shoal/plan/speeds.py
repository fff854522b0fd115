"""What `shoal check --save` measured of a machine's GPUs, for a hardware file of `shoal plan`."""

from __future__ import annotations

import msgspec

from shoal.model.fabric import Collective

Curve = tuple[tuple[float, float], ...]  # (size, rate), sizes rising


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
