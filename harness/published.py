"""Published placement rules that no policy offers, for comparison. A higher score is better."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from shoal.core.books.vacancy import WHOLE, Footprint, Vacancy
from shoal.core.scheduling.classic import GPU_SCALE


def rescaled(score: int, lowest: int, highest: int) -> int:
    """The score scaled to 0..100 among the nodes that fit."""
    return 100 * (score - lowest) // (highest - lowest) if highest > lowest else 0


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


def fgd(before: int, after: int, weight: int) -> int:
    """Fragmentation gradient descent (Weng et al., USENIX ATC'23): the published score of a change
    in `unusable`, for a mix with this total weight."""
    return int(100 / (1 + math.exp((after - before) / weight / WHOLE)))
