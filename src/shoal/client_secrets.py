"""The part of the client that sets, lists and removes secrets."""

from __future__ import annotations

from typing import Protocol, TypeVar

from shoal.model.secret import SecretView
from shoal.model.views import Done

Answer = TypeVar("Answer")


class Calls(Protocol):
    """What these calls need of the client."""

    def _call(
        self,
        method: str,
        kind: type[Answer],
        *parts: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        **query: str,
    ) -> Answer: ...


class SecretCalls:
    """`tenant`: an admin may name any; without one it is the sender's own."""

    def secrets(self: Calls, *, tenant: str = "") -> list[SecretView]:
        return self._call("GET", list[SecretView], "secrets", tenant=tenant)

    def set_secret(self: Calls, name: str, value: bytes, *, tenant: str = "") -> SecretView:
        """Members that start from now on get this value."""
        headers = {"Content-Type": "application/octet-stream"}
        return self._call(
            "PUT", SecretView, "secrets", name, body=value, headers=headers, tenant=tenant
        )

    def remove_secret(self: Calls, name: str, *, tenant: str = "") -> Done:
        return self._call("DELETE", Done, "secrets", name, tenant=tenant)
