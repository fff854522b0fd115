"""Calls about people: tenants, users, tokens, keys, secrets, notices and sign-in."""

from __future__ import annotations

from shoal.calls.call import Calls, Head, Needs, call
from shoal.model.identity import Role
from shoal.model.joining import JoinTokenView, KeyView, SecretKeyView
from shoal.model.notice import NewRule, NoticeSettings, NoticeTest, RulesView, SigningKey
from shoal.model.people import (
    ApiKeyView,
    AuditView,
    CodeView,
    DeviceAnswer,
    DeviceView,
    InviteCode,
    InviteView,
    LeavingView,
    MeView,
    NewApiKey,
    NewInvite,
    NewTenant,
    NewToken,
    NewUser,
    OidcConfig,
    OidcView,
    Roles,
    Rotation,
    SecretApiKeyView,
    SecretTokenView,
    TenantView,
    TokenView,
    UserView,
)
from shoal.model.secret import SecretView
from shoal.model.views import Done


class PeopleCalls(Calls):
    @call("GET", "/v1/me", Needs.SIGNED_IN)
    def me(self) -> MeView:
        """Who the sender is, and what they may do."""

    @call("GET", "/v1/audit", Needs.ADMIN)
    def audit(
        self, *, user: str = "", tenant: str = "", verb: str = "", limit: int = 100
    ) -> AuditView:
        """The audit log, the newest entries first. `verb` is one as in an entry, or the part of it
        before the dot."""

    @call("GET", "/v1/oidc", Needs.ADMIN, head=Head.ONLY_LEADER)
    def oidc(self) -> OidcView:
        """The OpenID provider, without its secret."""

    @call("PUT", "/v1/oidc", Needs.ADMIN, body="config")
    def set_oidc(self, config: OidcConfig) -> OidcView:
        """Sets the OpenID provider, if it answers. People who are signed in stay signed in."""

    @call("DELETE", "/v1/oidc", Needs.ADMIN)
    def remove_oidc(self) -> Done:
        """Forgets the OpenID provider."""

    @call("POST", "/v1/oidc/device", Needs.OPEN)
    def begin_device(self, tenant: str = "") -> DeviceView:
        """Begins a sign-in at the provider. Needs no token: it is how a person gets one."""

    @call("POST", "/v1/oidc/device/{handle}", Needs.OPEN)
    def poll_device(self, handle: str) -> DeviceAnswer:
        """The token, once the person has agreed at the provider."""

    @call("POST", "/v1/session/code", Needs.SIGNED_IN)
    def page_code(self) -> CodeView:
        """A code that signs a browser in once within two minutes."""

    @call("GET", "/v1/tenants", Needs.ADMIN)
    def tenants(self) -> list[TenantView]:
        """All tenants."""

    @call("POST", "/v1/tenants", Needs.ADMIN, body=NewTenant, status=201)
    def add_tenant(self, name: str, *, uid: int = 0) -> TenantView:
        """Adds a tenant; `uid` 0: with the next free Unix user."""

    @call("DELETE", "/v1/tenants/{name}", Needs.ADMIN)
    def remove_tenant(self, name: str) -> Done:
        """Removes a tenant that has no jobs and no users."""

    @call("GET", "/v1/users", Needs.ADMIN)
    def users(self) -> list[UserView]:
        """All users, with their roles."""

    @call("POST", "/v1/users", Needs.ADMIN, body=NewUser, status=201)
    def add_user(self, name: str, roles: dict[str, Role]) -> UserView:
        """Adds a user, with roles by tenant; "*" is every tenant."""

    @call("PUT", "/v1/users/{name}", Needs.ADMIN, body=Roles)
    def set_user(self, name: str, roles: dict[str, Role]) -> UserView:
        """Replaces all of the user's roles."""

    @call("GET", "/v1/users/{name}/leaving", Needs.ADMIN)
    def leaving(self, name: str, *, end: bool = False, heir: str = "") -> LeavingView:
        """What the user would leave behind, and what would become of it: see `remove_user`."""

    @call("DELETE", "/v1/users/{name}", Needs.ADMIN)
    def remove_user(self, name: str, *, end: bool = False, heir: str = "") -> LeavingView:
        """Removes a user and the user's tokens. With `end` the user's jobs and services are ended,
        otherwise they continue. Schedules go to the `heir`; without one they are paused."""

    @call("POST", "/v1/invites", Needs.ADMIN, body="wanted", status=201)
    def invite(self, wanted: NewInvite) -> InviteView:
        """Invites a user, who is added if needed. The code is good once, for at most 7 days. It is
        listed with the tokens, and removed like one."""

    @call("POST", "/v1/invites/accept", Needs.OPEN, body=InviteCode)
    def accept_invite(self, code: str) -> SecretTokenView:
        """The token that an invite stands for. Needs no token; the code is void afterwards."""

    @call("GET", "/v1/api-keys", Needs.WRITE)
    def api_keys(self, *, service: str = "") -> list[ApiKeyView]:
        """Keys for services of the sender's tenant, or for this service; an admin sees all."""

    @call("POST", "/v1/api-keys", Needs.WRITE, body="wanted", status=201)
    def add_api_key(self, wanted: NewApiKey) -> SecretApiKeyView:
        """Adds a key for services; its secret is shown once."""

    @call("DELETE", "/v1/api-keys/{key_id}", Needs.WRITE)
    def revoke_api_key(self, key_id: str) -> Done:
        """Revokes a key for services. The gateways refuse it within a second."""

    @call("GET", "/v1/tokens", Needs.SIGNED_IN)
    def tokens(self) -> list[TokenView]:
        """The sender's tokens; an admin sees all."""

    @call("POST", "/v1/tokens", Needs.SIGNED_IN, body="wanted", status=201)
    def add_token(self, wanted: NewToken) -> SecretTokenView:
        """Adds a token; its secret is shown once."""

    @call("POST", "/v1/tokens/{token_id}/rotate", Needs.SIGNED_IN, body=Rotation)
    def rotate_token(self, token_id: str, *, lifetime_ms: int | None = None) -> SecretTokenView:
        """Another secret for the token; the one before is void at once."""

    @call("DELETE", "/v1/tokens/{token_id}", Needs.SIGNED_IN)
    def remove_token(self, token_id: str) -> Done:
        """The token is void from the next request on."""

    @call("GET", "/v1/keys", Needs.ADMIN)
    def keys(self) -> list[KeyView]:
        """Join tokens, then the keys of nodes."""

    @call("GET", "/v1/keys/join", Needs.ADMIN)
    def join_key(self) -> JoinTokenView:
        """The cluster's join token, with which machines join."""

    @call("POST", "/v1/keys/join", Needs.ADMIN, status=201)
    def rotate_join_token(self) -> SecretKeyView:
        """Another join token; the one before is void at once. Nodes keep their keys."""

    @call("DELETE", "/v1/keys/{key_id}", Needs.ADMIN)
    def remove_key(self, key_id: str) -> Done:
        """The key is void: a node's link is closed, or no machine can join with the token."""


class SecretCalls(Calls):
    """`tenant`: an admin may name any; without one it is the sender's own."""

    @call("GET", "/v1/secrets", Needs.WRITE, neighbor=True)
    def secrets(self, *, tenant: str = "") -> list[SecretView]:
        """The names of secrets, without their values."""

    @call("PUT", "/v1/secrets/{name}", Needs.WRITE, body="value", neighbor=True)
    def set_secret(self, name: str, value: bytes, *, tenant: str = "") -> SecretView:
        """Sets a secret, byte for byte. Members that start from now on get this value."""

    @call("DELETE", "/v1/secrets/{name}", Needs.WRITE, neighbor=True)
    def remove_secret(self, name: str, *, tenant: str = "") -> Done:
        """Removes a secret. Members that have it keep it until they end."""


class NoticeCalls(Calls):
    @call("GET", "/v1/rules", Needs.WRITE)
    def rules(self) -> RulesView:
        """Your rules for notices, and how their receivers are doing."""

    @call("POST", "/v1/rules", Needs.WRITE, body=NewRule, status=201)
    def add_rule(self, wish: str, *, everyone: bool = False) -> Done:
        """`wish` is WHAT=WHERE, e.g. failed=https://chat.example.com/hook. With `everyone`, about
        the jobs of all users of your tenant."""

    @call("DELETE", "/v1/rules/{rule_id}", Needs.WRITE, renamed={"rule": "rule_id"})
    def remove_rule(self, rule: str) -> Done:
        """Removes a rule."""

    @call("POST", "/v1/rules/test", Needs.WRITE, body=NoticeTest)
    def test_rule(self, to: str) -> Done:
        """Sends a notice now, to a rule's receiver or to this one. `note` says what went wrong."""

    @call("GET", "/v1/rules/key", Needs.WRITE)
    def notice_key(self) -> SigningKey:
        """The key with which webhooks of your tenant are signed."""

    @call("GET", "/v1/rules/settings", Needs.ADMIN)
    def notice_settings(self) -> NoticeSettings:
        """How notices are sent: the mail server, and addresses that are allowed."""

    @call("PUT", "/v1/rules/settings", Needs.ADMIN, body="settings")
    def set_notice_settings(self, settings: NoticeSettings) -> NoticeSettings:
        """Sets how notices are sent."""
