"""Who may call a service: what the gateway has to know of those who show a key or a token."""

from __future__ import annotations

import msgspec

from shoal.model.identity import EVERY_TENANT, ApiKey

EVERY_SERVICE = "*"  # in place of names: all services of the key's tenant, later ones too
OPEN = "open"  # everybody who reaches the gateway
CLUSTER = "cluster"  # who shows a token of the cluster, or a key for the service
ACCESS_MAX = 64  # tenants that one service names


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who shows a secret with this hash: the owner of a key, or of a token of the cluster. A key
    may call what it names of its tenant's services; `services` is empty for a token."""

    id: str
    hash: str
    tenant: str
    services: tuple[str, ...] = ()
    until_ms: int = 0
    rpm: int = 0
    limited: bool = False  # in tokens

    def may_call(self, service: str, access: tuple[str, ...], tenant: str) -> bool:
        """Whether a service of this tenant is for them. The proxy's rules (gateway/guard.py) say
        the same."""
        if is_open(access):
            return True
        if self.services:
            named = service in self.services or EVERY_SERVICE in self.services
            return self.tenant == tenant and named
        return access == (CLUSTER,) or self.tenant in members(access, tenant)


def caller_of(key: ApiKey) -> Caller:
    return Caller(
        id=key.id,
        hash=key.hash,
        tenant=key.tenant,
        services=key.services or (EVERY_SERVICE,),
        until_ms=key.until_ms,
        rpm=key.rpm,
        limited=bool(key.tokens),
    )


def members(access: tuple[str, ...], tenant: str) -> tuple[str, ...]:
    """Tenants whose users may call a service that names tenants; its own always may."""
    return tuple(dict.fromkeys((*access, tenant, EVERY_TENANT)))


def access_of(access: tuple[str, ...], owner: str) -> tuple[str, ...]:
    """What the empty one stands for. `owner`: the tenant, if it is one that was added."""
    return access or ((CLUSTER,) if owner else (OPEN,))


def is_open(access: tuple[str, ...]) -> bool:
    return access in ((), (OPEN,))
