"""Shoal turns the machines you have into one AI cluster."""

from __future__ import annotations

__version__ = "0.6.0"

TYPE_CHECKING = False  # as type checkers read it; `typing` itself takes longer than all of this
if TYPE_CHECKING:
    from shoal.client import ShoalError
    from shoal.model.finding import JobFilter
    from shoal.sdk.asynchronous import AsyncClient
    from shoal.sdk.call import Call, JobFailed, run
    from shoal.sdk.client import Client, read_job, read_service
    from shoal.tasks import Executor, map  # noqa: A004

__all__ = [
    "AsyncClient",
    "Call",
    "Client",
    "Executor",
    "JobFailed",
    "JobFilter",
    "ShoalError",
    "__version__",
    "map",
    "read_job",
    "read_service",
    "run",
]

_MODULES = {
    "AsyncClient": "shoal.sdk.asynchronous",
    "Call": "shoal.sdk.call",
    "Client": "shoal.sdk.client",
    "Executor": "shoal.tasks",
    "JobFailed": "shoal.sdk.call",
    "JobFilter": "shoal.model.finding",
    "ShoalError": "shoal.client",
    "map": "shoal.tasks",
    "read_job": "shoal.sdk.client",
    "read_service": "shoal.sdk.client",
    "run": "shoal.sdk.call",
}


def __getattr__(name: str) -> object:
    """Loaded when used, so that `import shoal` stays light."""
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
