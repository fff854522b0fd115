"""Cells of the list of nodes: where a node is, where it comes from, and what of it is in use."""

from __future__ import annotations

from shoal.cli.screen.show import Cell, bar
from shoal.model.resources import cpus_text, memory_text
from shoal.model.views import NodeView

GPU_CELLS_MAX = 16


def place(view: NodeView) -> str:
    """As it was typed in, and as it was measured."""
    measured = f"{view.measured_place} (measured)" if view.measured_place else ""
    return ", ".join(filter(None, (view.place, measured)))


def source(view: NodeView) -> str:
    """The supply that brought it."""
    return view.origin or "local"


def gpus(view: NodeView) -> Cell:
    used = view.gpus - view.gpu_milli_free / 1000
    text = f"{used:g}/{view.gpus}"
    cells = bar(used, view.gpus, min(view.gpus, GPU_CELLS_MAX)) if view.gpus else ""
    return Cell(text, "green" if used else "dim", f"{cells} {text}".lstrip())


def cpus(view: NodeView) -> str:
    return f"{cpus_text(view.cpu_milli - view.cpu_milli_free)}/{cpus_text(view.cpu_milli)}"


def memory(view: NodeView) -> str:
    return f"{memory_text(view.memory_mb - view.memory_mb_free)}/{memory_text(view.memory_mb)}"
