"""The client's calls about tenants, users and tokens; a part of `shoal.client.Client`."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from shoal.model.audit import AuditView
from shoal.model.identity import Role
from shoal.model.joining import KeyView, SecretKeyView
from shoal.model.oidc import DeviceAnswer, DeviceView, OidcConfig, OidcView
from shoal.model.people import (
    MeView,
    NewTenant,
    NewToken,
    NewUser,
    Roles,
    Rotation,
    SecretTokenView,
    TenantView,
    TokenView,
    UserView,
)
from shoal.model.views import Done

Answer = TypeVar("Answer")


class IdentityCalls:
    def _call(
        self, method: str, kind: type[Answer], *parts: str, body: Any = None, **rest: Any
    ) -> Answer:
        raise NotImplementedError  # the client's own

    def me(self) -> MeView:
        return self._call("GET", MeView, "me")

    def audit(
        self, *, user: str = "", tenant: str = "", verb: str = "", limit: int = 100
    ) -> AuditView:
        """The audit log, the newest entries first."""
        query = {"user": user, "tenant": tenant, "verb": verb, "limit": limit}
        return self._call("GET", AuditView, "audit", **query)

    def oidc(self) -> OidcView:
        return self._call("GET", OidcView, "oidc")

    def set_oidc(self, config: OidcConfig) -> OidcView:
        return self._call("PUT", OidcView, "oidc", body=msgspec.json.encode(config))

    def remove_oidc(self) -> Done:
        return self._call("DELETE", Done, "oidc")

    def begin_device(self, tenant: str = "") -> DeviceView:
        """Needs no token: it is how a person gets one."""
        return self._call("POST", DeviceView, "oidc", "device", tenant=tenant)

    def poll_device(self, handle: str) -> DeviceAnswer:
        return self._call("POST", DeviceAnswer, "oidc", "device", handle)

    def tenants(self) -> list[TenantView]:
        return self._call("GET", list[TenantView], "tenants")

    def add_tenant(self, name: str, *, uid: int = 0) -> TenantView:
        body = msgspec.json.encode(NewTenant(name=name, uid=uid))
        return self._call("POST", TenantView, "tenants", body=body)

    def remove_tenant(self, name: str) -> Done:
        return self._call("DELETE", Done, "tenants", name)

    def users(self) -> list[UserView]:
        return self._call("GET", list[UserView], "users")

    def add_user(self, name: str, roles: dict[str, Role]) -> UserView:
        body = msgspec.json.encode(NewUser(name=name, roles=roles))
        return self._call("POST", UserView, "users", body=body)

    def set_user(self, name: str, roles: dict[str, Role]) -> UserView:
        """Replaces all of the user's roles."""
        body = msgspec.json.encode(Roles(roles=roles))
        return self._call("PUT", UserView, "users", name, body=body)

    def remove_user(self, name: str) -> Done:
        return self._call("DELETE", Done, "users", name)

    def tokens(self) -> list[TokenView]:
        return self._call("GET", list[TokenView], "tokens")

    def add_token(self, wanted: NewToken) -> SecretTokenView:
        return self._call("POST", SecretTokenView, "tokens", body=msgspec.json.encode(wanted))

    def rotate_token(self, token_id: str, *, lifetime_ms: int | None = None) -> SecretTokenView:
        """The token's secret from before is void at once."""
        body = msgspec.json.encode(Rotation(lifetime_ms=lifetime_ms))
        return self._call("POST", SecretTokenView, "tokens", token_id, "rotate", body=body)

    def remove_token(self, token_id: str) -> Done:
        return self._call("DELETE", Done, "tokens", token_id)

    def keys(self) -> list[KeyView]:
        """Join tokens, then the keys of nodes."""
        return self._call("GET", list[KeyView], "keys")

    def rotate_join_token(self) -> SecretKeyView:
        """The cluster's join token from before is void at once; nodes keep their keys."""
        return self._call("POST", SecretKeyView, "keys", "join")

    def remove_key(self, key_id: str) -> Done:
        return self._call("DELETE", Done, "keys", key_id)
