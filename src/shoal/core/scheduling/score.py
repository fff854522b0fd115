"""Which of the nodes that fit a policy prefers: placements as small pure scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.core.room import Level
from shoal.core.scheduling.fragments import Room, Task
from shoal.core.scheduling.registry import Registry
from shoal.model.job import JobSpec
from shoal.model.resources import WHOLE_GPU_MILLI, Kind

if TYPE_CHECKING:
    from shoal.core.state import State

# The lower is better. `before` and `after` are what is free on the node without and with the gang.
Score = Callable[["State", Kind, Level, Level], tuple[float, ...]]


def gpu_milli(level: Level) -> int:
    return level.gpus * WHOLE_GPU_MILLI + sum(level.shares)


def _first_fit(_state: State, _kind: Kind, _before: Level, _after: Level) -> tuple[float, ...]:
    return ()


def _best_fit(_state: State, kind: Kind, _before: Level, after: Level) -> tuple[float, ...]:
    """The least left over, of GPUs and CPUs alike, as parts of what the node has."""
    gpus = gpu_milli(after) / (kind.gpus * WHOLE_GPU_MILLI) if kind.gpus else 0.0
    cpus = after.cpu_milli / kind.cpu_milli if kind.cpu_milli else 0.0
    return (gpus + cpus,)


def _packing(_state: State, _kind: Kind, before: Level, after: Level) -> tuple[float, ...]:
    """Used GPUs before free ones, used nodes before empty ones."""
    return (before.gpus - after.gpus, before.gpus, before.cpu_milli)


def _foresight(state: State, kind: Kind, before: Level, after: Level) -> tuple[float, ...]:
    """What later jobs like those seen would have filled here and now cannot; among equals, the
    fewest free GPUs and then the least left of the rest: large holes stay whole."""
    value = state.foresight.value
    model = kind.gpu_model
    loss = value(_room(before, model)) - value(_room(after, model)) if kind.gpus else 0
    return (loss, gpu_milli(after), after.cpu_milli, after.memory_mb)


def task_of(spec: JobSpec) -> Task:
    """A member of the job, as foresight counts it; a share by memory counts as half a GPU."""
    share = spec.gpu_milli or WHOLE_GPU_MILLI // 2
    models = tuple(sorted(spec.gpu_models))
    return Task(spec.cpu_milli, spec.memory_mb, spec.gpus, share if spec.gpus else 0, models)


def _room(level: Level, model: str) -> Room:
    gpus = (WHOLE_GPU_MILLI,) * level.gpus + level.shares[::-1]
    return Room(level.cpu_milli, level.memory_mb, gpus, model)


PLACEMENTS: Registry[Score] = Registry(
    "placement",
    {
        "first-fit": _first_fit,
        "best-fit": _best_fit,
        "packing": _packing,
        "shoal": _foresight,
    },
)
