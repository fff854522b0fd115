"""Who may do what: tenants, users, tokens, and keys of nodes. A cluster without any of the first
three belongs to its operator alone.

A user has a role in each tenant that the user may act for. A token acts for one user in one tenant,
with that role or a lesser one. The operator, who started the cluster, needs no record.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec

from shoal.model.ids import number_of
from shoal.model.job import JOB_NAME_PATTERN
from shoal.model.node import NODE_ID_PATTERN

EVERY_TENANT = "*"  # in place of a tenant: all of them
OPERATOR = "operator"  # who started the cluster; no user can have this name
TENANT_UIDS = range(
    61_000, 65_000
)  # Unix users of tenants, unless given; no distribution uses them
TENANTS_MAX = 1_000
REMOVED_MAX = 10 * TENANTS_MAX  # names of tenants that are gone; the oldest are forgotten
USERS_MAX = 10_000
TOKENS_MAX = 20_000
TOKENS_PER_USER_MAX = 50
INVITES_MAX = 200  # that were not accepted yet
INVITE_MS_MAX = 7 * 86_400_000
KEYS_MAX = 20_000  # of nodes
JOIN_TOKENS_MAX = 100
API_KEYS_MAX = 10_000
API_KEYS_OF_TENANT_MAX = 2_000
KEY_SERVICES_MAX = 16  # that one key names
ENDED_EACH_MAX = 32  # sign-ins of one token that were ended and are known by name

Name = Annotated[str, msgspec.Meta(max_length=63, pattern=JOB_NAME_PATTERN)]
UserName = Annotated[
    str, msgspec.Meta(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]*(?!\n)$")
]
TenantOrAll = Annotated[
    str, msgspec.Meta(max_length=63, pattern=r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]*)(?!\n)$")
]


Only = Literal["", "neighbor"]


# A service's name is the first label of its host name and the first part of its path.
SERVICE_NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(?!\n)$"
ServiceName = Annotated[str, msgspec.Meta(max_length=63, pattern=SERVICE_NAME_PATTERN)]


class Role(enum.StrEnum):
    """Each may do what those before it may."""

    VIEWER = "viewer"  # look
    MEMBER = "member"  # and run jobs and services
    ADMIN = "admin"  # everything, for every tenant

    @property
    def rank(self) -> int:
        return RANKS[self]


RANKS = {role: rank for rank, role in enumerate(Role)}


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant whose jobs are kept apart from the operator's and other tenants': where agents are
    root, they run as the Unix user `uid`. Shares, quotas and budgets are the policy's."""

    name: Name
    uid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 2)]
    since_ms: int = 0
    # There was a tenant of this name before: jobs with a lower number are that one's. 0: there was
    # none.
    first_job: int = 0

    @property
    def key(self) -> str:
        """What its belongings are filed under. No other tenant ever has the same."""
        return f"{self.name}@{self.since_ms}" if self.first_job else self.name


class User(msgspec.Struct, frozen=True, kw_only=True):
    """Roles by tenant: an admin has `{"*": "admin"}`; `{"*": "viewer"}` sees the whole cluster.
    `subject` names the person at an OpenID provider, for users who sign in there."""

    name: UserName
    roles: Annotated[dict[TenantOrAll, Role], msgspec.Meta(max_length=TENANTS_MAX)] = {}
    since_ms: int = 0
    subject: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """`hash` is the SHA-256 of the secret part, in hex: the token itself is stored nowhere. A
    token that ends at `until_ms` (0: never) or whose user lost the role in its tenant is void. An
    `invite` lets nobody in: whoever shows its secret gets another one instead, once. `only`: it is
    good for nothing but what such a sender does (docs/neighbors.md)."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{8,16}(?!\n)$")]
    user: UserName
    tenant: TenantOrAll
    role: Role
    hash: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]
    until_ms: int = 0
    since_ms: int = 0
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""
    invite: bool = False
    only: Only = ""


class NodeKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine shows. With a `node`: the key of that node's link, good for nothing else.
    Without one: a join token, with which any machine may become a node. With an `order`: a join
    token for the machines of that order alone, each of them once. `hash` and `until_ms` are as for
    a token."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{8,16}(?!\n)$")]
    hash: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]
    node: Annotated[str, msgspec.Meta(max_length=63, pattern=f"^$|{NODE_ID_PATTERN}")] = ""
    until_ms: int = 0
    since_ms: int = 0
    note: Annotated[str, msgspec.Meta(max_length=200)] = ""
    order: Annotated[str, msgspec.Meta(max_length=16)] = ""


def order_key_id(order: str) -> str:
    """The id of the join token of an order. No other token can have it: theirs are hex digits."""
    return f"ord{order[1:]:0>12}"


class Per(enum.StrEnum):
    DAY = "day"  # in UTC, as in budgets
    MONTH = "month"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """Good for services of one tenant at the gateway, and for nothing else. `hash` is the SHA-256
    of the secret part. The secret has 256 random bits: nobody can try them, so one round is enough,
    and the proxy can afford it for each request. `user`: whom it was given to, a user or any other
    name. 0: no bound."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{8,16}(?!\n)$")]
    hash: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]
    tenant: Name
    services: Annotated[
        tuple[ServiceName, ...], msgspec.Meta(max_length=KEY_SERVICES_MAX)
    ] = ()  # none: all of the tenant's
    user: UserName = "anybody"
    tokens: Annotated[int, msgspec.Meta(ge=0, le=10**15)] = 0
    per: Per = Per.DAY
    rpm: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0  # requests a minute
    until_ms: int = 0
    since_ms: int = 0
    who: Annotated[str, msgspec.Meta(max_length=63)] = ""  # made it

    def lives(self, now_ms: int) -> bool:
        return not self.until_ms or self.until_ms > now_ms


class EndedSignIns(msgspec.Struct):
    """Sign-ins of one token that were ended before they would have expired: `names`, with that time
    of each. Those that were too many to name: all that expire by `until_ms`."""

    names: dict[str, int] = {}
    until_ms: int = 0


class Identity(msgspec.Struct):
    """A part of the facts: only `apply` changes it. `next_uid`: the Unix users before it were given
    out, perhaps to a tenant that is gone and whose files are still there. `removed`: since when
    tenants are gone, so that nothing of theirs runs as the agent's user. `ended`: sign-ins that
    were ended, by token ("": the operator's own), until they would have expired. `spent`: Unix
    users of tenants that are gone, as far as they are ours to give. `api_keys`: for services."""

    tenants: dict[str, TenantRecord] = {}
    users: dict[str, User] = {}
    tokens: dict[str, Token] = {}
    keys: dict[str, NodeKey] = {}
    next_uid: int = TENANT_UIDS.start
    removed: dict[str, int] = {}
    ended: dict[str, EndedSignIns] = {}
    spent: list[int] = []
    api_keys: dict[str, ApiKey] = {}

    def key(self, tenant: str) -> str:
        """A name without a record is the operator's own, and means itself."""
        record = self.tenants.get(tenant)
        return record.key if record is not None else tenant

    def is_earlier(self, tenant: str, job: str) -> bool:
        """Whether the job is of an earlier tenant of this name."""
        record = self.tenants.get(tenant)
        return record is not None and number_of(job) < record.first_job

    def has_ended(self, token: str, session: str, until_ms: int) -> bool:
        """Whether somebody has signed out of it."""
        known = self.ended.get(token)
        return known is not None and (session in known.names or until_ms <= known.until_ms)

    def keys_of(self, node: str) -> list[NodeKey]:
        """Never more than one; "" gives the join tokens."""
        return [key for key in self.keys.values() if key.node == node]

    def role(self, token: Token) -> Role | None:
        """What the token may do now, whatever it could when it was made."""
        user = self.users.get(token.user)
        if user is None:
            return None
        return lesser(token.role, role_in(user, token.tenant))


def role_in(user: User, tenant: str) -> Role | None:
    """The user's role in a tenant: the greater of the one there and the one in every tenant."""
    found = [role for name in (tenant, EVERY_TENANT) if (role := user.roles.get(name))]
    return max(found, key=lambda role: role.rank, default=None)


def lesser(one: Role, other: Role | None) -> Role | None:
    return None if other is None else min(one, other, key=lambda role: role.rank)
