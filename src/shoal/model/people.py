"""Tenants, users and tokens as the API shows them and takes them. No view contains a hash."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.identity import Name, Role, TenantOrAll, UserName

LIFETIME_MS_MAX = 10 * 365 * 24 * 3600 * 1000
LifetimeMs = Annotated[int, msgspec.Meta(ge=0, le=LIFETIME_MS_MAX)]
Uid = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 2)]


class MeView(msgspec.Struct, kw_only=True):
    """Who the sender is. `token` is the token's id, and `until_ms` is when it ends (0: never)."""

    user: str
    tenant: str  # "*": all of them
    role: Role
    token: str = ""
    until_ms: int = 0


class TenantView(msgspec.Struct, kw_only=True):
    name: str
    uid: int
    since_ms: int
    users: int
    jobs: int  # that have not ended


class UserView(msgspec.Struct, kw_only=True):
    name: str
    roles: dict[str, Role]
    since_ms: int
    tokens: int


class TokenView(msgspec.Struct, kw_only=True):
    """`void` says why the token lets nobody in; empty if it does."""

    id: str
    user: str
    tenant: str
    role: Role
    since_ms: int
    until_ms: int
    note: str
    void: str = ""


class SecretTokenView(msgspec.Struct, kw_only=True):
    """`secret` is the whole token. It is shown in this answer and never again."""

    token: TokenView
    secret: str


class NewTenant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`uid` 0: the next free Unix user."""

    name: Name
    uid: Uid = 0


class Roles(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """By tenant; "*" is every tenant."""

    roles: Annotated[dict[TenantOrAll, Role], msgspec.Meta(max_length=1000)] = {}


class NewUser(Roles, kw_only=True, forbid_unknown_fields=True):
    name: UserName


class NewToken(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Without `user`: the sender. Without `tenant`: the user's only one. Without `role`: the user's
    role there. `lifetime_ms` 0: it does not expire."""

    user: UserName | None = None
    tenant: TenantOrAll | None = None
    role: Role | None = None
    lifetime_ms: LifetimeMs = 0
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""


class Rotation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Without `lifetime_ms`, the token ends when it would have ended before."""

    lifetime_ms: LifetimeMs | None = None


class CodeView(msgspec.Struct, kw_only=True):
    """Signs a browser in once."""

    code: str
    until_ms: int
