"""Tenants, users, tokens, the audit log and OpenID Connect, as the API shows and takes them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.model.identity import (
    EVERY_TENANT,
    INVITE_MS_MAX,
    KEY_SERVICES_MAX,
    Name,
    Only,
    Per,
    Role,
    ServiceName,
    TenantOrAll,
    UserName,
)

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
    invite: bool = False  # nobody has accepted it yet
    only: Only = ""


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
    only: Only = ""


class ApiKeyView(msgspec.Struct, kw_only=True):
    """A key for services. Without `services`: for all of the tenant. `void` says why it is good for
    none; empty if it is good. `who` made it."""

    id: str
    tenant: str
    services: tuple[str, ...]
    user: str
    tokens: int
    per: Per
    rpm: int
    since_ms: int
    until_ms: int
    who: str
    void: str = ""


class SecretApiKeyView(msgspec.Struct, kw_only=True):
    """`secret` is the whole key. It is shown in this answer and never again."""

    key: ApiKeyView
    secret: str


class NewApiKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Without `services`: for all of the tenant. Without `tenant`: that of the services, or of the
    sender. 0: no bound, and it does not expire."""

    services: Annotated[tuple[ServiceName, ...], msgspec.Meta(max_length=KEY_SERVICES_MAX)] = ()
    user: UserName | None = None
    tenant: Name | None = None
    tokens: Annotated[int, msgspec.Meta(ge=0, le=10**15)] = 0
    per: Per = Per.DAY
    rpm: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    lifetime_ms: LifetimeMs = 0


class NewInvite(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A user who does not exist is added with this role; then `tenant` is needed, unless it is an
    admin's. `lifetime_ms` is how long the invite can be accepted."""

    user: UserName
    tenant: TenantOrAll | None = None
    role: Role | None = None
    lifetime_ms: Annotated[int, msgspec.Meta(ge=1, le=INVITE_MS_MAX)] = INVITE_MS_MAX


class InviteCode(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    code: Annotated[str, msgspec.Meta(max_length=512)]


class InviteView(msgspec.Struct, kw_only=True):
    """`code` is shown in this answer and never again. It can be accepted once: on the page, at
    `/#invite=CODE`, or in place of a token at `shoal login`."""

    token: TokenView
    code: str
    fingerprint: str = ""  # of the certificate, for `shoal login`; empty: none is needed


class Left(msgspec.Struct, kw_only=True):
    """Something of a user who leaves. `then` is what becomes of it."""

    kind: Literal["job", "service", "schedule", "token", "notice", "secret"]
    id: str
    name: str = ""
    tenant: str = ""
    state: str = ""
    then: str = ""


class LeavingView(msgspec.Struct, kw_only=True):
    """What a user leaves behind. `more`: how many are not listed."""

    id: str
    left: list[Left]
    more: int = 0


class Rotation(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Without `lifetime_ms`, the token ends when it would have ended before."""

    lifetime_ms: LifetimeMs | None = None


class CodeView(msgspec.Struct, kw_only=True):
    """Signs a browser in once."""

    code: str
    until_ms: int


# The audit log: who did or tried what, when, from where, and how it ended.


class AuditEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`verb` is what was asked (as `jobs.cancel`) and `on` is what of (as `j7`). `status` is the
    answer's. `source` is the sender's address, or `socket` for the socket file of the home.
    `skipped` counts the requests before this line that were too many to write: refused ones, and
    those of the same user with the same verb. `prev` is the hash of the line before, in the first
    line of a file only. In a cluster with a database, `id` names the line, and `via` the head that
    was asked."""

    seq: int
    at_ms: int
    who: str = ""
    tenant: str = ""
    token: str = ""
    verb: str = ""
    on: str = ""
    status: int = 0
    source: str = ""
    skipped: int = 0
    id: str = ""
    via: str = ""
    prev: str = ""
    hash: str = ""

    @property
    def outcome(self) -> str:
        if self.status < 400:
            return "done"
        return "refused" if self.status < 500 else "failed"


class AuditView(msgspec.Struct, kw_only=True):
    """The newest entries first. `head` is the hash of the newest line of all."""

    entries: list[AuditEntry]
    head: str


class Mark(msgspec.Struct, frozen=True):
    """The newest line that is known to be on the disk, kept beside the log."""

    seq: int
    hash: str


# Sign-in by OpenID Connect: how the provider is configured, and what the API shows of it.


Text = Annotated[str, msgspec.Meta(max_length=1000)]


class GroupRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The role that members of a group get, in a tenant ("*": in every tenant)."""

    tenant: TenantOrAll = EVERY_TENANT
    role: Role = Role.MEMBER


class OidcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`user_claim` is the claim that becomes the user's name, `groups_claim` the one that lists the
    person's groups. A person who is in none of `groups` does not get in."""

    issuer: Text
    client_id: Text
    client_secret: Text = ""
    user_claim: Text = "preferred_username"
    groups_claim: Text = "groups"
    groups: Annotated[dict[str, GroupRule], msgspec.Meta(max_length=1000)] = {}


class OidcView(msgspec.Struct, kw_only=True):
    """Never with the secret."""

    issuer: str
    client_id: str
    has_secret: bool
    user_claim: str
    groups_claim: str
    groups: dict[str, GroupRule]


class DeviceView(msgspec.Struct, kw_only=True):
    """What a person types where, to sign in on a machine without a browser."""

    handle: str
    user_code: str
    url: str
    url_complete: str
    interval_ms: int
    expires_ms: int


class DeviceAnswer(msgspec.Struct, kw_only=True):
    """`secret` is the token, once the person has agreed; empty until then."""

    secret: str = ""
    interval_ms: int = 5_000


def problem_with(config: OidcConfig) -> str | None:
    """As `field: what is wrong`."""
    near = ("http://127.0.0.1", "http://localhost", "http://[::1]")
    if not config.issuer.startswith(("https://", *near)):
        return "issuer: must begin with https://"
    if not config.client_id:
        return "client_id: is empty; the provider shows it where you register Shoal"
    if not config.groups:
        return "groups: is empty, so nobody could sign in; write e.g. {lab-team: {tenant: lab}}"
    for group, rule in config.groups.items():
        if rule.role is Role.ADMIN and rule.tenant != EVERY_TENANT:
            return f"groups.{group}: an admin is one for every tenant; leave the tenant out"
        if rule.role is Role.MEMBER and rule.tenant == EVERY_TENANT:
            return f"groups.{group}: a member belongs to a tenant; write e.g. {{tenant: lab}}"
    return None


def roles_for(config: OidcConfig, groups: list[str], tenants: list[str]) -> dict[str, Role]:
    """The roles that the groups give, by tenant; the greatest where several do. Tenants that do not
    exist are left out."""
    roles: dict[str, Role] = {}
    for group, rule in config.groups.items():
        if group in groups and rule.tenant in (EVERY_TENANT, *tenants):
            before = roles.get(rule.tenant)
            if before is None or before.rank < rule.role.rank:
                roles[rule.tenant] = rule.role
    return roles
