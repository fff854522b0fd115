"""Measures the GPUs of this machine for a hardware file of `shoal plan`, through torch.

`measure` takes about 20 s, and a second more per further GPU. The first free GPU stands for all.
"""

from __future__ import annotations

import importlib.util
import socket
import time
from collections.abc import Callable
from typing import Any

from shoal.model.fabric import Collective
from shoal.plan.hardware import Curve, Measured
from shoal.probes import collectives
from shoal.probes.collective_ranks import Share

SIZES = (512, 1024, 2048, 4096, 8192, 16_384)
PRODUCTS_S = 0.4  # of each size, because clocks fall after the first moments
COPY_BYTES = 4 << 30
HOST_BYTES = 1 << 30
ATTENTION = (4, 16, 4096, 128)  # sequences, heads, tokens, size of a head
COLLECTIVES_S = 60.0


class NotMeasurable(Exception):
    """Why, in one line."""


def measure() -> Measured:
    if importlib.util.find_spec("torch") is None:
        raise NotMeasurable("torch is not installed here: pip install 'shoal[train]'")
    import torch

    if not torch.cuda.is_available():
        raise NotMeasurable("torch sees no GPU here, so there is nothing to write for a plan")
    device = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * COPY_BYTES:
        raise NotMeasurable(f"GPU 0 has {free >> 30} GiB free, and 12 GiB are needed to measure it")
    copy = _copy_gbs(torch)
    up, down = _host_gbs(torch)
    products = {
        name: _products(torch, kind)
        for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    }
    if (fp8 := _fp8(torch)) is not None:
        products["fp8"] = fp8
    flash = _flash_tflops(torch)
    many = torch.cuda.device_count()
    torch.cuda.empty_cache()
    rows, notes = _together() if many > 1 else ((), ())
    return Measured(
        gpu=device.name,
        gpus=many,
        memory_gib=round(device.total_memory / 2**30, 1),
        power_w=_power_w(),
        matmul_tflops=products,
        flash_tflops=flash,
        copy_gbs=copy,
        up_gbs=up,
        down_gbs=down,
        collectives=rows,
        notes=notes,
    )


def seconds(torch: Any, act: Callable[[], Any], at_least: float) -> float:
    """Of one, by the GPU's own clock: as many as fill `at_least`, after some that warm up."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    act()
    act()
    times = 1
    while True:
        begin.record()
        for _ in range(times):
            act()
        end.record()
        end.synchronize()
        took = begin.elapsed_time(end) / 1000
        if took >= at_least:
            return float(took / times)
        times = max(times * 2, int(times * 1.2 * at_least / max(took, 1e-6)))


def _products(torch: Any, kind: Any) -> Curve:
    curve = []
    for size in SIZES:
        left, right = (torch.randn(size, size, device="cuda", dtype=kind) for _ in range(2))
        out = torch.empty_like(left)

        def act(a: Any = left, b: Any = right, c: Any = out) -> Any:
            return torch.matmul(a, b, out=c)

        took = seconds(torch, act, PRODUCTS_S)
        curve.append((float(size), round(2 * size**3 / took / 1e12, 1)))
    return tuple(curve)


def _fp8(torch: Any) -> Curve | None:
    """None where the GPU, or this torch, has no such product."""
    curve = []
    try:
        one = torch.tensor(1.0, device="cuda")
        for size in SIZES[2:]:
            left = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)
            right = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn).t()

            def act(a: Any = left, b: Any = right) -> Any:
                return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

            took = seconds(torch, act, PRODUCTS_S)
            curve.append((float(size), round(2 * size**3 / took / 1e12, 1)))
    except (RuntimeError, AttributeError):
        return None
    return tuple(curve)


def _flash_tflops(torch: Any) -> float:
    """Causal attention, forward and backward: 3.5 times the FLOPs of the forward pass, of which
    only half of the square is computed."""
    many, heads, tokens, size = ATTENTION
    shape = (many, heads, tokens, size)
    parts = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    grad = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def act() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        out.backward(grad)

    forward = 4 * many * heads * tokens**2 * size / 2
    return round(3.5 * forward / seconds(torch, act, PRODUCTS_S) / 1e12, 1)


def _copy_gbs(torch: Any) -> float:
    one, two = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return round(2 * COPY_BYTES / seconds(torch, lambda: two.copy_(one), PRODUCTS_S) / 1e9, 1)


def _host_gbs(torch: Any) -> tuple[float, float]:
    host = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(HOST_BYTES, dtype=torch.uint8, device="cuda")
    up = seconds(torch, lambda: there.copy_(host, non_blocking=True), PRODUCTS_S)
    down = seconds(torch, lambda: host.copy_(there, non_blocking=True), PRODUCTS_S)
    return round(HOST_BYTES / up / 1e9, 1), round(HOST_BYTES / down / 1e9, 1)


def _power_w() -> float:
    try:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        return float(pynvml.nvmlDeviceGetEnforcedPowerLimit(device) // 1000)
    except Exception:  # not installed, or no driver: NVML has an exception for each
        return 0.0


def _together() -> tuple[tuple[Collective, ...], tuple[str, ...]]:
    """Collectives among the GPUs of this machine, which is the only host."""
    free = collectives.free_gpus()
    if len(free) < 2:
        return (), ("collectives: fewer than two GPUs are free here",)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    share = Share(
        address="127.0.0.1",
        port=port,
        nodes=("here",),
        ranks_of=(len(free),),
        first_rank=0,
        gpus=tuple(free),
        seconds=COLLECTIVES_S,
        bytes_max=collectives.GPU_BYTES_MAX,
    )
    found = collectives.ranks_of_host(
        share, "127.0.0.1", len(free), time.monotonic() + COLLECTIVES_S + collectives.MORE_S
    )
    return found.rows, found.notes
