"""What can happen to tenants, users, tokens and keys."""

from __future__ import annotations

from shoal.model.eventbase import EventBase
from shoal.model.identity import NodeKey, TenantRecord, Token, User


class IdentityEvent(EventBase, frozen=True, kw_only=True):
    """Only admins are shown these."""

    who: str = ""


class TenantAdded(IdentityEvent, frozen=True, kw_only=True):
    tenant: TenantRecord


class TenantRemoved(IdentityEvent, frozen=True, kw_only=True):
    """Its tokens go with it, and its users' roles in it."""

    tenant: str


class UserSet(IdentityEvent, frozen=True, kw_only=True):
    """Added, or with other roles than before."""

    user: User


class UserRemoved(IdentityEvent, frozen=True, kw_only=True):
    """The user's tokens go as well; the user's jobs continue."""

    user: str


class TokenSet(IdentityEvent, frozen=True, kw_only=True):
    """Added, or given another secret (rotated)."""

    token: Token


class TokenRemoved(IdentityEvent, frozen=True, kw_only=True):
    token: str


class SignInEnded(IdentityEvent, frozen=True, kw_only=True):
    """Somebody signed out of a sign-in that was made with a token ("": the operator's own), and
    that would have expired at `until_ms`. Then it is forgotten."""

    token: str
    session: str
    until_ms: int


class KeySet(IdentityEvent, frozen=True, kw_only=True):
    """A join token, or the key of a node that joins."""

    key: NodeKey


class KeyRemoved(IdentityEvent, frozen=True, kw_only=True):
    key: str
    why: str = ""
