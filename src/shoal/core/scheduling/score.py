"""Which of the nodes that fit a policy prefers: placements as small pure scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.core.room import Level
from shoal.core.scheduling.registry import Registry
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


def _tightest(_state: State, kind: Kind, before: Level, after: Level) -> tuple[float, ...]:
    """The fewest free GPUs, then the least left of the rest: large holes stay whole."""
    broken = before.gpus == kind.gpus and after.gpus != kind.gpus
    return (float(broken), gpu_milli(after), after.cpu_milli, after.memory_mb)


PLACEMENTS: Registry[Score] = Registry(
    "placement",
    {
        "first-fit": _first_fit,
        "best-fit": _best_fit,
        "packing": _packing,
        "shoal": _tightest,
    },
)
