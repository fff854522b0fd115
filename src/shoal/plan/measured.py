"""A hardware file from what was measured: `shoal plan --hardware FILE` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.model.fabric import Collective
from shoal.plan.hardware import Accelerator
from shoal.plan.library import Catalogue
from shoal.plan.speeds import Curve, Measured

MEMORY_APART = 0.15  # cards of one name with other memory are other entries
USUAL_SHARE = 0.75  # of the peak that a large product reaches, where nobody knows the peak
SOURCE = "measured by shoal check"
LOCAL_GBS = 32.0  # PCIe, where nobody measured


def toml(measured: Measured, known: Catalogue, when: str = "") -> str:
    """GPUs that the catalogue knows get only what was measured; others a whole entry."""
    name = entry_name(measured, known.accelerators)
    chip = known.accelerators.get(name)
    lines = [f"# {measured.gpus} x {measured.gpu}, {SOURCE}{f' on {when}' if when else ''}."]
    lines += [f"# Host to GPU {measured.up_gbs:g} GB/s, GPU to host {measured.down_gbs:g} GB/s."]
    lines += [f"# {note}" for note in measured.notes]
    lines += ["", f"[accelerators.{name}]", *_accelerator(measured, chip)]
    if node := _node(measured, name, known):
        lines += ["", *node]
    return "\n".join(lines) + "\n"


def fabric_toml(rows: Sequence[Collective], latency_us: int, when: str = "") -> str:
    """The network between nodes, as a fabric of its own; empty if no all-reduce was measured."""
    reduced = [row for row in rows if row.name == "all-reduce" and row.bus_mbs]
    if not reduced:
        return ""
    by = "NCCL on GPUs" if reduced[0].backend == "nccl" else "gloo on CPUs, so GPUs may do better"
    curve = tuple((float(row.size_bytes), row.bus_mbs / 1000) for row in reduced)
    return "\n".join(
        [
            f"# {reduced[0].ranks} ranks, {by}; {SOURCE}{f' on {when}' if when else ''}.",
            "# Choose it with: shoal plan --fabric measured",
            "",
            "[fabrics.measured]",
            f"latency_us = {latency_us or 5}",
            f"busbw = {_curve(curve)}",
            f'source = "{SOURCE}"',
            "",
        ]
    )


def entry_name(measured: Measured, known: Mapping[str, Accelerator]) -> str:
    """The catalogue's name of this GPU, or one made of its own."""
    words = measured.gpu.lower().replace("nvidia", "").replace("tesla", "").split()
    parts = [part for word in words for part in word.split("-")]
    fitting = [
        name
        for name, chip in known.items()
        if name.split("-")[0] in parts
        and abs(chip.memory_gib - measured.memory_gib) <= MEMORY_APART * chip.memory_gib
    ]
    return max(fitting, key=len) if fitting else "-".join(parts) or "gpu"


def _accelerator(measured: Measured, chip: Accelerator | None) -> list[str]:
    curves = measured.matmul_tflops
    best = {kind: max(rate for _, rate in curve) for kind, curve in curves.items() if curve}
    lines = []
    if chip is None:
        peaks = ", ".join(f"{kind} = {rate / USUAL_SHARE:.0f}" for kind, rate in best.items())
        lines += [
            f"peak_tflops = {{ {peaks} }} # guessed: {USUAL_SHARE:.0%} of it was reached",
            f"memory_gib = {measured.memory_gib:g}",
            f"memory_gbs = {measured.copy_gbs:g}",
            f"link_gbs = {LOCAL_GBS:g} # assumed",
            f"power_w = {measured.power_w or 300:g}",
        ]
    peak = chip.peak("bf16") / 1e12 if chip else best.get("bf16", 0.0) / USUAL_SHARE
    if peak and "bf16" in best:
        lines.append(f"matmul = {min(1.0, best['bf16'] / peak):.3f}")
        if measured.flash_tflops:
            lines.append(f"flash = {min(1.0, measured.flash_tflops / peak):.3f}")
    if measured.copy_gbs:
        lines.append(f"copy_gbs = {measured.copy_gbs:g}")
    if "bf16" in curves:
        lines.append(f"matmul_tflops = {_curve(curves['bf16'])}")
    lines += [f"# {kind}: {_curve(curve)}" for kind, curve in curves.items() if kind != "bf16"]
    lines.append(f'source = "{SOURCE}"')
    return lines


def _node(measured: Measured, name: str, known: Catalogue) -> list[str]:
    """Collectives within the node. A kind of node that is known keeps its network."""
    rows = [row for row in measured.collectives if row.name == "all-reduce" and row.bus_mbs]
    kind = next((kind for kind in known.nodes.values() if kind.accelerator == name), None)
    lines = [f"[nodes.{kind.name if kind and kind.gpus == measured.gpus else name + '-node'}]"]
    if not kind or kind.gpus != measured.gpus:
        lines += [f'accelerator = "{name}"', f"gpus = {measured.gpus}", "nic_gbs = 12.5 # assumed"]
    elif not rows:
        return []
    if rows:
        curve = tuple((float(row.size_bytes), row.bus_mbs / 1000) for row in rows)
        lines.append(f"link_busbw = {_curve(curve)}")
    others = [row for row in measured.collectives if row.name != "all-reduce"]
    lines += [
        f"# {row.name}, {row.size_bytes} bytes: {row.bus_mbs / 1000:g} GB/s" for row in others
    ]
    return [*lines, f'source = "{SOURCE}"']


def _curve(curve: Curve) -> str:
    return "[" + ", ".join(f"[{size:.0f}, {rate:g}]" for size, rate in curve) + "]"
