"""Shoal turns the machines you have into one AI cluster."""

from __future__ import annotations

__version__ = "0.2.0"

TYPE_CHECKING = False  # as type checkers read it; `typing` itself takes longer than all of this
if TYPE_CHECKING:
    from shoal.tasks import Executor, map  # noqa: A004

__all__ = ["Executor", "__version__", "map"]


def __getattr__(name: str) -> object:
    """Loaded when used, so that `import shoal` stays light."""
    if name in ("map", "Executor"):
        import shoal.tasks

        return getattr(shoal.tasks, name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
