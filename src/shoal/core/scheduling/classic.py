"""The scores of published placement rules, for comparison. A higher score is better."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

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
    """Least CPU and GPU left after placement; see `rescaled`."""
    cpu = (vacancy.cpu_milli - task.cpu_milli) * GPU_SCALE
    gpu = (sum(vacancy.gpus) - task.milli) * CPU_SCALE
    scale = CPU_SCALE * GPU_SCALE
    return (100 * scale - 50 * (cpu + gpu)) // scale


def rescaled(score: int, lowest: int, highest: int) -> int:
    """The score scaled to 0..100 among the nodes that fit."""
    return 100 * (score - lowest) // (highest - lowest) if highest > lowest else 0


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


def clustering(vacancy: Vacancy, task: Footprint) -> int:
    """Keeps tasks of one class together. Needs `vacancy.held`."""
    if not task.gpus:
        return 0
    base = 25 * (GPU_SCALE - sum(vacancy.gpus)) // GPU_SCALE
    if task_class(task) in vacancy.held:
        return base + (75 if len(vacancy.held) == 1 else 50)
    return base if vacancy.held else base + 25


def task_class(task: Footprint) -> int:
    """0 for shared GPUs, else the number of whole GPUs."""
    return 0 if task.shared else task.gpus


def typical(tasks: Iterable[Footprint], percent: int = 95) -> dict[Footprint, int]:
    """The most frequent tasks, ignoring memory, until this percentage of all tasks is covered."""
    counts = Counter(task._replace(memory_mb=0) for task in tasks)
    wanted = percent * counts.total()
    result: dict[Footprint, int] = {}
    covered = 0
    for task, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if 100 * covered >= wanted:
            break
        result[task] = count
        covered += count
    return result


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


def fgd(before: int, after: int, weight: int) -> int:
    """Fragmentation gradient descent (Weng et al., USENIX ATC'23): the published score of a change
    in `unusable`, for a mix with this total weight."""
    return int(100 / (1 + math.exp((after - before) / weight / WHOLE)))
