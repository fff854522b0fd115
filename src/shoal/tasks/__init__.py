"""Many small tasks over worker processes: `shoal.map` and `shoal.Executor` (docs/tasks.md).

Names are loaded on first use, so that `import shoal` and the start of a worker stay fast.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # see shoal/__init__.py
if TYPE_CHECKING:
    from shoal.tasks.cluster import Cluster
    from shoal.tasks.errors import InitFailed, TaskFailed, Unloadable, WorkerDied
    from shoal.tasks.executor import Executor
    from shoal.tasks.mapping import map  # noqa: A004
    from shoal.tasks.worker import context

__all__ = [
    "Cluster",
    "Executor",
    "InitFailed",
    "TaskFailed",
    "Unloadable",
    "WorkerDied",
    "context",
    "map",
]

_HOMES = {
    "Cluster": "cluster",
    "Executor": "executor",
    "InitFailed": "errors",
    "TaskFailed": "errors",
    "Unloadable": "errors",
    "WorkerDied": "errors",
    "context": "worker",
    "map": "mapping",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.tasks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"shoal.tasks.{_HOMES[name]}"), name)
