"""What events do to tenants, users, tokens and keys; a part of `apply`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shoal.core.state.apply_notices import forget_rules
from shoal.core.state.state import State
from shoal.model.events import (
    EventBase,
    KeyRemoved,
    KeySet,
    SignInEnded,
    TenantAdded,
    TenantRemoved,
    TokenRemoved,
    TokenSet,
    UserRemoved,
    UserSet,
)
from shoal.model.identity import ENDED_EACH_MAX, REMOVED_MAX, TENANT_UIDS, EndedSignIns, Token


def _tenant_added(state: State, event: TenantAdded) -> None:
    identity = state.identity
    identity.tenants[event.tenant.name] = event.tenant
    identity.removed.pop(event.tenant.name, None)
    if event.tenant.uid in TENANT_UIDS:
        identity.next_uid = max(identity.next_uid, event.tenant.uid + 1)


def _tenant_removed(state: State, event: TenantRemoved) -> None:
    identity = state.identity
    record = identity.tenants.pop(event.tenant)
    identity.removed[event.tenant] = max(event.at_ms, record.since_ms)
    if record.uid in TENANT_UIDS and record.uid not in identity.spent:
        identity.spent.append(record.uid)
    state.accounts.forget(event.tenant)
    if len(identity.removed) > REMOVED_MAX:
        del identity.removed[next(iter(identity.removed))]
    forget_rules(state, lambda rule: rule.tenant == event.tenant)
    _drop_tokens(state, lambda token: token.tenant == event.tenant)
    for user in list(identity.users.values()):
        if event.tenant in user.roles:
            roles = {name: role for name, role in user.roles.items() if name != event.tenant}
            identity.users[user.name] = msgspec.structs.replace(user, roles=roles)


def _user_set(state: State, event: UserSet) -> None:
    state.identity.users[event.user.name] = event.user


def _user_removed(state: State, event: UserRemoved) -> None:
    identity = state.identity
    del identity.users[event.user]
    forget_rules(state, lambda rule: rule.owner == event.user)
    _drop_tokens(state, lambda token: token.user == event.user)


def _drop_tokens(state: State, which: Callable[[Token], bool]) -> None:
    identity = state.identity
    for token in [token for token in identity.tokens.values() if which(token)]:
        del identity.tokens[token.id]
        identity.ended.pop(token.id, None)


def _token_set(state: State, event: TokenSet) -> None:
    state.identity.tokens[event.token.id] = event.token


def _token_removed(state: State, event: TokenRemoved) -> None:
    del state.identity.tokens[event.token]
    state.identity.ended.pop(event.token, None)


def _sign_in_ended(state: State, event: SignInEnded) -> None:
    """Bounded for each token, so nobody makes another's be forgotten. Of too many, those that
    expire first are not told from sign-ins that expire before them: all of those have ended."""
    ended = state.identity.ended
    for token, known in list(ended.items()):
        names = {name: until for name, until in known.names.items() if until > event.at_ms}
        if names or known.until_ms > event.at_ms:
            known.names = names
        else:
            del ended[token]
    own = ended.setdefault(event.token, EndedSignIns())
    own.names[event.session] = event.until_ms
    while len(own.names) > ENDED_EACH_MAX:
        first = min(own.names, key=lambda name: own.names[name])
        own.until_ms = max(own.until_ms, own.names.pop(first))


def _key_set(state: State, event: KeySet) -> None:
    state.identity.keys[event.key.id] = event.key


def _key_removed(state: State, event: KeyRemoved) -> None:
    del state.identity.keys[event.key]


APPLY_IDENTITY: dict[type[EventBase], Callable[[State, Any], None]] = {
    TenantAdded: _tenant_added,
    TenantRemoved: _tenant_removed,
    UserSet: _user_set,
    UserRemoved: _user_removed,
    TokenSet: _token_set,
    TokenRemoved: _token_removed,
    SignInEnded: _sign_in_ended,
    KeySet: _key_set,
    KeyRemoved: _key_removed,
}
