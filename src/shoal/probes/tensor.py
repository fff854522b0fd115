"""Probe of what GPUs compute and copy per second, through torch where it is installed."""

from __future__ import annotations

import glob
import importlib.util
import time
from typing import Any

from shoal.probes.reading import Reading, mbs, nothing

SIZE = 4096
RUNS = 3
PRODUCTS_PER_RUN = 40
COPY_BYTES = 64 * 1024 * 1024
FREE_BYTES_MIN = 1024 * 1024 * 1024


def tensors(deadline: float) -> Reading:
    """`deadline` of the monotonic clock: GPUs that it leaves no time for are noted."""
    found = nothing()
    if not glob.glob("/dev/nvidia[0-9]*"):
        return found  # loading torch takes longer than all the rest
    if importlib.util.find_spec("torch") is None:
        found.notes.append("GPU rates: torch is not installed")
        return found
    import torch

    if not torch.cuda.is_available():
        found.notes.append("GPU rates: torch sees no GPU")
        return found
    for number in range(torch.cuda.device_count()):
        if time.monotonic() > deadline:
            found.notes.append(f"gpu {number} and further: no time left to measure their rates")
            break
        try:
            _one(torch, number, found)
        except torch.cuda.OutOfMemoryError:
            found.notes.append(f"gpu {number}: too little memory free to measure its rates")
        except RuntimeError as error:
            text = str(error).strip().partition("\n")[0][:160]
            found.faults.append(f"gpu {number}: cannot compute: {text}")
    return found


def _one(torch: Any, number: int, found: Reading) -> None:
    free, _ = torch.cuda.mem_get_info(number)
    if free < FREE_BYTES_MIN:
        found.notes.append(f"gpu {number}: too little memory free to measure its rates")
        return
    with torch.cuda.device(number):
        _products(torch, number, found)
        _copies(torch, number, found)


def _products(torch: Any, number: int, found: Reading) -> None:
    kind = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    left = torch.randn(SIZE, SIZE, device="cuda", dtype=kind)
    right = torch.randn(SIZE, SIZE, device="cuda", dtype=kind)
    product = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(PRODUCTS_PER_RUN):
            torch.matmul(left, right, out=product)

    flops = 2 * SIZE**3 * PRODUCTS_PER_RUN
    found.figures[f"gpu{number}_matmul_gflops"] = round(flops / _best_s(torch, multiply) / 1e9)
    if not bool(torch.isfinite(product).all()):
        found.faults.append(f"gpu {number}: computes wrongly: a product is not finite")


def _copies(torch: Any, number: int, found: Reading) -> None:
    """From and to memory that the GPU may read by itself."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    up_s = _best_s(torch, lambda: there.copy_(host, non_blocking=True))
    down_s = _best_s(torch, lambda: host.copy_(there, non_blocking=True))
    found.figures[f"gpu{number}_copy_up_mbs"] = mbs(COPY_BYTES, up_s)
    found.figures[f"gpu{number}_copy_down_mbs"] = mbs(COPY_BYTES, down_s)


def _best_s(torch: Any, act: Any) -> float:
    """The shortest of some runs after one that warms up, by the GPU's own clock."""
    act()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        act()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1000)
    return best
