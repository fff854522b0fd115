"""What a task takes from a node, what is free on a node, and what is left after placement.

GPUs are counted in thousandths (`WHOLE` is one GPU), because tasks may share one.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.model.job import JobSpec
from shoal.model.resources import is_called

WHOLE = 1000


class Footprint(NamedTuple):
    """What a task takes from a node. `models` are the GPU models it accepts; none means any."""

    cpu_milli: int
    memory_mb: int
    gpus: int
    gpu_milli: int  # of each GPU; below WHOLE only for a task with one GPU
    models: tuple[str, ...] = ()

    @property
    def milli(self) -> int:
        return self.gpus * self.gpu_milli

    @property
    def shared(self) -> bool:
        return 0 < self.gpu_milli < WHOLE


class Vacancy(NamedTuple):
    """What is free on a node. Nodes with equal vacancies get equal scores."""

    cpu_milli: int
    memory_mb: int
    gpus: tuple[int, ...]  # milli left on each of its GPUs, the freest first
    model: str
    held: tuple[int, ...] = ()  # classes of the GPU tasks here; kept by a benchmark only


def fits(vacancy: Vacancy, task: Footprint) -> bool:
    if vacancy.cpu_milli < task.cpu_milli or vacancy.memory_mb < task.memory_mb:
        return False
    wanted = task.gpus
    if not wanted:
        return True
    enough = wanted <= len(vacancy.gpus) and vacancy.gpus[wanted - 1] >= task.gpu_milli
    return enough and accepts(task, vacancy.model)


def accepts(task: Footprint, model: str) -> bool:
    models = task.models
    return not models or model in models or any(is_called(model, name) for name in models)


def choices(vacancy: Vacancy, task: Footprint) -> list[int]:
    """Distinct places in `vacancy.gpus` for a fitting task, the tightest last; one for whole
    GPUs."""
    if not task.shared:
        return [0]
    gpus, needed = vacancy.gpus, task.gpu_milli
    return [
        place
        for place, left in enumerate(gpus)
        if left >= needed and (not place or left != gpus[place - 1])
    ]


def take(vacancy: Vacancy, task: Footprint, place: int = 0) -> Vacancy:
    """What is left after the task takes the GPU at `place`, or whole free GPUs."""
    gpus = list(vacancy.gpus)
    for index in range(place, place + task.gpus):
        gpus[index] -= task.gpu_milli
    gpus.sort(reverse=True)
    return Vacancy(
        vacancy.cpu_milli - task.cpu_milli,
        vacancy.memory_mb - task.memory_mb,
        tuple(gpus),
        vacancy.model,
        vacancy.held,
    )


def task_of(spec: JobSpec) -> Footprint:
    """A member of the job, as foresight counts it; a share by memory counts as half a GPU."""
    share = spec.gpu_milli or WHOLE // 2
    models = tuple(sorted(spec.gpu_models)) if spec.gpu_models else ()
    return Footprint(spec.cpu_milli, spec.memory_mb, spec.gpus, share if spec.gpus else 0, models)
