"""Sign-in by OpenID Connect: how the provider is configured, and what the API shows of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.identity import EVERY_TENANT, Role, TenantOrAll

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
        return "issuer: must begin with https://, because what it says is believed"
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
