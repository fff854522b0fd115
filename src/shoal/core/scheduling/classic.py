"""The scores of published placement rules, for comparison. A higher score is better."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.core.books.vacancy import WHOLE, Footprint, Vacancy, fits

# The published scores are scaled by the largest node of that cluster.
CPU_SCALE = 128_000
GPU_SCALE = 8 * WHOLE


def dot_product(vacancy: Vacancy, task: Footprint) -> int:
    """Prefers small nodes for large tasks: least aligned vacancy and request."""
    cpu = vacancy.cpu_milli * task.cpu_milli * GPU_SCALE**2
    gpu = sum(vacancy.gpus) * task.milli * CPU_SCALE**2
    scale = (CPU_SCALE * GPU_SCALE) ** 2
    return (100 * scale - 50 * (cpu + gpu)) // scale


def best_fit(vacancy: Vacancy, task: Footprint) -> int:
    """Least CPU and GPU left after placement."""
    cpu = (vacancy.cpu_milli - task.cpu_milli) * GPU_SCALE
    gpu = (sum(vacancy.gpus) - task.milli) * CPU_SCALE
    scale = CPU_SCALE * GPU_SCALE
    return (100 * scale - 50 * (cpu + gpu)) // scale


def packing(vacancy: Vacancy, task: Footprint) -> int:
    """Shared GPUs that are in use first, then free GPUs of nodes in use, then idle nodes."""
    if not task.gpus:
        return 0
    idle = len(vacancy.gpus)
    if vacancy.gpus[-1] == WHOLE:
        return max(33 - idle, idle)
    used = [left for left in reversed(vacancy.gpus) if left >= task.gpu_milli][: task.gpus]
    free = used.count(WHOLE)
    return max(50 - free, 33) if free else max(100 - sum(used) // 100, 50)


def unusable(vacancy: Vacancy, mix: Mapping[Footprint, int]) -> int:
    """GPU-milli here that tasks of the mix cannot use, summed by their weights."""
    everything = sum(vacancy.gpus)
    result = 0
    for task, weight in mix.items():
        if task.gpus and fits(vacancy, task):
            result += weight * sum(left for left in vacancy.gpus if left < task.gpu_milli)
        else:
            result += weight * everything
    return result
