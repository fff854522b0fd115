"""A hardware file that was measured is read by the plan that it is for."""

from __future__ import annotations

import tomllib
from pathlib import Path

from shoal.model.fabric import Collective
from shoal.plan.hardware import Measured
from shoal.plan.layout import Layout
from shoal.plan.library import catalog, fabric_toml, hardware, model, toml
from shoal.plan.step import estimate

EXAMPLE = Path(__file__).parents[2] / "examples" / "hardware" / "h200.toml"
BF16 = ((1024.0, 100.0), (16_384.0, 600.0))


def reduced(size: int, mbs: int) -> Collective:
    return Collective(
        name="all-reduce",
        size_bytes=size,
        ranks=8,
        took_us=1,
        algorithm_mbs=mbs,
        bus_mbs=mbs,
        backend="nccl",
    )


def test_a_known_gpu_gets_what_was_measured_and_keeps_the_rest() -> None:
    measured = Measured(
        gpu="NVIDIA H100 80GB HBM3",
        gpus=8,
        memory_gib=79.1,
        matmul_tflops={"bf16": BF16, "fp8": BF16},
        flash_tflops=400.0,
        copy_gbs=2900.0,
        collectives=(reduced(8, 0), reduced(8**8, 120_000), reduced(8**10, 360_000)),
    )
    text = toml(measured, hardware(), "2026-11-17")
    known = catalog(tomllib.loads(text), hardware())
    chip, before = known.accelerator("h100"), hardware().accelerator("h100")
    assert (chip.copy_gbs, chip.matmul_tflops) == (2900.0, BF16)
    assert chip.peak_tflops == before.peak_tflops
    assert chip.price_hour == before.price_hour
    node = known.node("dgx-h100")
    assert node.link_busbw == ((float(8**8), 120.0), (float(8**10), 360.0))
    assert node.nic_gbs == hardware().node("dgx-h100").nic_gbs


def test_a_gpu_that_nobody_knows_gets_a_whole_entry() -> None:
    measured = Measured(
        gpu="Acme X-9", gpus=2, memory_gib=24, matmul_tflops={"bf16": BF16}, copy_gbs=800.0
    )
    known = catalog(tomllib.loads(toml(measured, hardware())), hardware())
    cluster = known.cluster("acme-x-9", 4)
    assert cluster.gpus == 8
    layout = Layout(data=8, zero=3, recompute="full")
    assert estimate(model("gpt2"), cluster, layout).step_s > 0


def test_the_example_is_what_such_a_file_looks_like() -> None:
    known = catalog(tomllib.loads(EXAMPLE.read_text()), hardware())
    assert known.accelerator("h200").copy_gbs > 4000
    assert known.node("h200-node").gpus == 1


def test_a_measured_network_is_a_fabric_of_its_own() -> None:
    rows = [reduced(8**5, 900), reduced(8**9, 11_000)]
    known = catalog(tomllib.loads(fabric_toml(rows, 31)), hardware())
    fabric = known.cluster("h100", 2, fabric="measured").fabric
    assert (fabric.latency_us, fabric.busbw) == (31.0, ((32_768.0, 0.9), (8.0**9, 11.0)))
    assert fabric_toml([], 31) == ""
