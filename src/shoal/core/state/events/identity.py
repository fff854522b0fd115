"""What happens to tenants, users, tokens and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import msgspec

from shoal.core.state.events.base import EventBase, Reader
from shoal.core.state.state import State
from shoal.model.hidden import NO_HASH
from shoal.model.identity import (
    ENDED_EACH_MAX,
    REMOVED_MAX,
    TENANT_UIDS,
    ApiKey,
    EndedSignIns,
    NodeKey,
    TenantRecord,
    Token,
    User,
)
from shoal.model.notice import Rule
from shoal.model.phrases import because, by


class IdentityEvent(EventBase, frozen=True, kw_only=True):
    """Only admins are shown these."""

    who: str = ""

    def visible_to(self, reader: Reader) -> bool:
        return reader.admin


class TenantAdded(IdentityEvent, frozen=True, kw_only=True):
    tenant: TenantRecord

    def apply(self, state: State) -> None:
        identity = state.identity
        identity.tenants[self.tenant.name] = self.tenant
        identity.removed.pop(self.tenant.name, None)
        _drop_api_keys(state, lambda key: key.tenant == self.tenant.name)  # it was the operator's
        if self.tenant.uid in TENANT_UIDS:
            identity.next_uid = max(identity.next_uid, self.tenant.uid + 1)

    @property
    def subject(self) -> str:
        return f"tenant {self.tenant.name}"

    def phrase(self) -> str:
        return f"was added{by(self.who)} (Unix user {self.tenant.uid})"


class TenantRemoved(IdentityEvent, frozen=True, kw_only=True):
    """Its tokens and keys go with it, and its users' roles in it."""

    tenant: str

    def apply(self, state: State) -> None:
        identity = state.identity
        record = identity.tenants.pop(self.tenant)
        identity.removed[self.tenant] = max(self.at_ms, record.since_ms)
        if record.uid in TENANT_UIDS and record.uid not in identity.spent:
            identity.spent.append(record.uid)
        state.accounts.forget(self.tenant)
        if len(identity.removed) > REMOVED_MAX:
            del identity.removed[next(iter(identity.removed))]
        forget_rules(state, lambda rule: rule.tenant == self.tenant)
        _drop_tokens(state, lambda token: token.tenant == self.tenant)
        _drop_api_keys(state, lambda key: key.tenant == self.tenant)
        for user in list(identity.users.values()):
            if self.tenant in user.roles:
                roles = {name: role for name, role in user.roles.items() if name != self.tenant}
                identity.users[user.name] = msgspec.structs.replace(user, roles=roles)

    @property
    def subject(self) -> str:
        return f"tenant {self.tenant}"

    def phrase(self) -> str:
        return f"was removed{by(self.who)}"


class UserSet(IdentityEvent, frozen=True, kw_only=True):
    """Added, or with other roles than before."""

    user: User

    def apply(self, state: State) -> None:
        state.identity.users[self.user.name] = self.user

    @property
    def subject(self) -> str:
        return f"user {self.user.name}"

    def phrase(self) -> str:
        roles = ", ".join(f"{role} of {name}" for name, role in self.user.roles.items())
        return f"was set{by(self.who)}: {roles.replace('*', 'every tenant') or 'no role'}"


class UserRemoved(IdentityEvent, frozen=True, kw_only=True):
    """The user's tokens and keys for services go as well; the user's jobs continue."""

    user: str

    def apply(self, state: State) -> None:
        identity = state.identity
        del identity.users[self.user]
        forget_rules(state, lambda rule: rule.owner == self.user)
        _drop_tokens(state, lambda token: token.user == self.user)
        _drop_api_keys(state, lambda key: key.user == self.user)

    @property
    def subject(self) -> str:
        return f"user {self.user}"

    def phrase(self) -> str:
        return f"was removed{by(self.who)}"


class TokenSet(IdentityEvent, frozen=True, kw_only=True):
    """Added, or given another secret (rotated)."""

    token: Token

    def apply(self, state: State) -> None:
        state.identity.tokens[self.token.id] = self.token

    @property
    def subject(self) -> str:
        return f"token {self.token.id}"

    def phrase(self) -> str:
        kind = " as an invite" if self.token.invite else ""
        return f"of {self.token.user} was set{kind}{by(self.who)}"

    def without_secrets(self) -> Self:
        token = msgspec.structs.replace(self.token, hash=NO_HASH)
        return msgspec.structs.replace(self, token=token)


class TokenRemoved(IdentityEvent, frozen=True, kw_only=True):
    token: str

    def apply(self, state: State) -> None:
        del state.identity.tokens[self.token]
        state.identity.ended.pop(self.token, None)

    @property
    def subject(self) -> str:
        return f"token {self.token}"

    def phrase(self) -> str:
        return f"was removed{by(self.who)}"


class SignInEnded(IdentityEvent, frozen=True, kw_only=True):
    """Somebody signed out of a sign-in that was made with a token ("": the operator's own), and
    that would have expired at `until_ms`. Then it is forgotten."""

    token: str
    session: str
    until_ms: int

    def apply(self, state: State) -> None:
        """Bounded for each token, so nobody makes another's be forgotten. Of too many, those that
        expire first are not told from sign-ins that expire before them: all of those have ended."""
        ended = state.identity.ended
        for token, known in list(ended.items()):
            names = {name: until for name, until in known.names.items() if until > self.at_ms}
            if names or known.until_ms > self.at_ms:
                known.names = names
            else:
                del ended[token]
        own = ended.setdefault(self.token, EndedSignIns())
        own.names[self.session] = self.until_ms
        while len(own.names) > ENDED_EACH_MAX:
            first = min(own.names, key=lambda name: own.names[name])
            own.until_ms = max(own.until_ms, own.names.pop(first))

    @property
    def subject(self) -> str:
        return f"a sign-in {f'with token {self.token}' if self.token else 'of the operator'}"

    def phrase(self) -> str:
        return f"was ended{by(self.who)}"


class KeySet(IdentityEvent, frozen=True, kw_only=True):
    """A join token, or the key of a node that joins."""

    key: NodeKey

    def apply(self, state: State) -> None:
        state.identity.keys[self.key.id] = self.key

    @property
    def subject(self) -> str:
        return f"the key of {self.key.node}" if self.key.node else "a join token"

    def phrase(self) -> str:
        return f"was set{by(self.who)} ({self.key.id})"

    def without_secrets(self) -> Self:
        key = msgspec.structs.replace(self.key, hash=NO_HASH)
        return msgspec.structs.replace(self, key=key)


class KeyRemoved(IdentityEvent, frozen=True, kw_only=True):
    key: str
    why: str = ""

    def apply(self, state: State) -> None:
        del state.identity.keys[self.key]

    @property
    def subject(self) -> str:
        return f"key {self.key}"

    def phrase(self) -> str:
        return f"was removed{by(self.who)}{because(self.why)}"


class ApiKeyEvent(EventBase, frozen=True, kw_only=True):
    """The tenant whose services the key is for sees it, too."""

    tenant: str
    who: str = ""

    def visible_to(self, reader: Reader) -> bool:
        return reader.admin or reader.sees_tenant(self.tenant, self.at_ms)


class ApiKeyAdded(ApiKeyEvent, frozen=True, kw_only=True):
    key: ApiKey

    def apply(self, state: State) -> None:
        state.identity.api_keys[self.key.id] = self.key

    @property
    def subject(self) -> str:
        return f"the key {self.key.id}"

    def phrase(self) -> str:
        what = ", ".join(self.key.services) or f"all services of {self.tenant}"
        return f"of {self.key.user} for {what} was added{by(self.who)}"

    def without_secrets(self) -> Self:
        return msgspec.structs.replace(self, key=msgspec.structs.replace(self.key, hash=NO_HASH))


class ApiKeyRevoked(ApiKeyEvent, frozen=True, kw_only=True):
    key: str
    why: str = ""

    def apply(self, state: State) -> None:
        del state.identity.api_keys[self.key]
        state.accounts.held_keys.pop(self.key, None)

    @property
    def subject(self) -> str:
        return f"the key {self.key}"

    def phrase(self) -> str:
        return f"was revoked{by(self.who)}{because(self.why)}"


def _drop_api_keys(state: State, which: Callable[[ApiKey], bool]) -> None:
    keys = state.identity.api_keys
    for key in [key for key in keys.values() if which(key)]:
        del keys[key.id]
        state.accounts.held_keys.pop(key.id, None)


def _drop_tokens(state: State, which: Callable[[Token], bool]) -> None:
    identity = state.identity
    for token in [token for token in identity.tokens.values() if which(token)]:
        del identity.tokens[token.id]
        identity.ended.pop(token.id, None)


def forget_rules(state: State, which: Callable[[Rule], bool]) -> None:
    """With their tenant or their owner."""
    for rule in [rule for rule in state.rules.values() if which(rule)]:
        del state.rules[rule.id]
