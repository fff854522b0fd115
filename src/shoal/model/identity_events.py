"""What can happen to tenants, users, tokens and keys."""

from __future__ import annotations

from typing import Self

import msgspec

from shoal.model.eventbase import EventBase, Reader
from shoal.model.hidden import NO_HASH
from shoal.model.identity import NodeKey, TenantRecord, Token, User
from shoal.model.phrases import because, by


class IdentityEvent(EventBase, frozen=True, kw_only=True):
    """Only admins are shown these."""

    who: str = ""

    def visible_to(self, reader: Reader) -> bool:
        return reader.admin


class TenantAdded(IdentityEvent, frozen=True, kw_only=True):
    tenant: TenantRecord

    @property
    def subject(self) -> str:
        return f"tenant {self.tenant.name}"

    def phrase(self) -> str:
        return f"was added{by(self.who)} (Unix user {self.tenant.uid})"


class TenantRemoved(IdentityEvent, frozen=True, kw_only=True):
    """Its tokens go with it, and its users' roles in it."""

    tenant: str

    @property
    def subject(self) -> str:
        return f"tenant {self.tenant}"

    def phrase(self) -> str:
        return f"was removed{by(self.who)}"


class UserSet(IdentityEvent, frozen=True, kw_only=True):
    """Added, or with other roles than before."""

    user: User

    @property
    def subject(self) -> str:
        return f"user {self.user.name}"

    def phrase(self) -> str:
        roles = ", ".join(f"{role} of {name}" for name, role in self.user.roles.items())
        return f"was set{by(self.who)}: {roles.replace('*', 'every tenant') or 'no role'}"


class UserRemoved(IdentityEvent, frozen=True, kw_only=True):
    """The user's tokens go as well; the user's jobs continue."""

    user: str

    @property
    def subject(self) -> str:
        return f"user {self.user}"

    def phrase(self) -> str:
        return f"was removed{by(self.who)}"


class TokenSet(IdentityEvent, frozen=True, kw_only=True):
    """Added, or given another secret (rotated)."""

    token: Token

    @property
    def subject(self) -> str:
        return f"token {self.token.id}"

    def phrase(self) -> str:
        return f"of {self.token.user} was set{by(self.who)}"

    def without_secrets(self) -> Self:
        token = msgspec.structs.replace(self.token, hash=NO_HASH)
        return msgspec.structs.replace(self, token=token)


class TokenRemoved(IdentityEvent, frozen=True, kw_only=True):
    token: str

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

    @property
    def subject(self) -> str:
        return f"a sign-in {f'with token {self.token}' if self.token else 'of the operator'}"

    def phrase(self) -> str:
        return f"was ended{by(self.who)}"


class KeySet(IdentityEvent, frozen=True, kw_only=True):
    """A join token, or the key of a node that joins."""

    key: NodeKey

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

    @property
    def subject(self) -> str:
        return f"key {self.key}"

    def phrase(self) -> str:
        return f"was removed{by(self.who)}{because(self.why)}"
