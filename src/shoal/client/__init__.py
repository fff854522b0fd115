"""The client of the API. What it is made of is loaded when it is used."""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers read it; `typing` itself takes longer than all of this
if TYPE_CHECKING:
    from shoal.client.address import SOCKET_NAME, Address
    from shoal.client.client import Client, default_home
    from shoal.client.transport import ShoalError, Unreachable

__all__ = ["SOCKET_NAME", "Address", "Client", "ShoalError", "Unreachable", "default_home"]
PARTS = {
    **dict.fromkeys(("Client", "default_home"), "client"),
    **dict.fromkeys(("SOCKET_NAME", "Address"), "address"),
    **dict.fromkeys(("ShoalError", "Unreachable"), "transport"),
}


def __getattr__(name: str) -> object:
    if name not in PARTS:
        raise AttributeError(f"module 'shoal.client' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"shoal.client.{PARTS[name]}"), name)
