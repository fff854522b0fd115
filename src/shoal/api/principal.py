"""Who sends a request, and what they may send."""

from __future__ import annotations

import msgspec

from shoal.calls.call import Needs
from shoal.model.identity import EVERY_TENANT, OPERATOR, Identity, NodeKey, Only, Role, Token, User
from shoal.model.ids import number_of

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # these change nothing
JOINING = "a machine that joins"
SCOPE = "shoal.principal"  # in a request's scope, once its sender is known


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """`token` is the id of the token, empty for the operator's own. A machine has a `key` instead,
    and a `node`, unless the key is a join token."""

    user: str
    tenant: str
    role: Role
    token: str = ""
    key: str = ""
    node: str = ""
    first_job: int = 0  # of a tenant whose name another had before, and since when it has it
    since_ms: int = 0
    only: Only = ""

    @property
    def admin(self) -> bool:
        return self.role is Role.ADMIN

    @property
    def sees_all(self) -> bool:
        return self.admin or self.tenant == EVERY_TENANT

    def sees(self, tenant: str) -> bool:
        return self.sees_all or self.tenant == tenant

    def sees_job(self, tenant: str, job: str) -> bool:
        """Jobs outlive their tenant, and the next one may have its name."""
        return self.sees(tenant) and (not self.first_job or number_of(job) >= self.first_job)

    def may(self, needs: Needs) -> bool:
        if self.key:
            return needs in (Needs.OPEN, Needs.NODE)
        match needs:
            case Needs.OPEN | Needs.SIGNED_IN | Needs.READ:
                return True
            case Needs.READ_ALL:
                return self.sees_all
            case Needs.WRITE:
                return self.role is not Role.VIEWER
            case Needs.ADMIN:
                return self.admin
            case Needs.NODE:
                return False


class Session(msgspec.Struct, frozen=True):
    """A signed cookie: it stays valid when the controller restarts. It acts for a token (empty: the
    operator's own), and ends with it or with the token's secret."""

    name: str
    until_ms: int
    token: str = ""


class Proof(msgspec.Struct, frozen=True):
    """What let a request in: `shown`, or the operator's own token. `user`: as the user was then."""

    who: Principal
    shown: Token | NodeKey | None = None
    user: User | None = None
    until_ms: int = 0  # 0: never
    session: Session | None = None


def acting(
    identity: Identity, user: str, tenant: str, role: Role, token: str = "", only: Only = ""
) -> Principal:
    """Whoever acts for a tenant sees nothing of an earlier one of its name."""
    record = identity.tenants.get(tenant)
    again = record is not None and record.first_job
    return Principal(
        user=user,
        tenant=tenant,
        role=role,
        token=token,
        first_job=record.first_job if record and again else 0,
        since_ms=record.since_ms if record and again else 0,
        only=only,
    )


def machine(key: NodeKey) -> Principal:
    """The sender of a request with this key."""
    name = f"node {key.node}" if key.node else JOINING
    return Principal(user=name, tenant="", role=Role.VIEWER, key=key.id, node=key.node)


THE_OPERATOR = Principal(user=OPERATOR, tenant=EVERY_TENANT, role=Role.ADMIN)
