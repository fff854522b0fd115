"""The client of the API. What it is made of is loaded when it is used."""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers read it; `typing` itself takes longer than all of this
if TYPE_CHECKING:
    from shoal.client.client import Client, default_home
    from shoal.client.transport import SOCKET_NAME, Address, ShoalError, Unreachable

__all__ = ["SOCKET_NAME", "Address", "Client", "ShoalError", "Unreachable", "default_home"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'shoal.client' has no attribute {name!r}")
    import importlib

    part = "client" if name in ("Client", "default_home") else "transport"
    return getattr(importlib.import_module(f"shoal.client.{part}"), name)
