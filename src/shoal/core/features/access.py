"""Who may call a service: keys, and everybody whom the gateway lets in."""

from __future__ import annotations

import msgspec

from shoal.core.state.events.identity import ApiKeyAdded, ApiKeyRevoked
from shoal.core.state.round import Round
from shoal.core.state.state import State
from shoal.model.access import Caller, caller_of
from shoal.model.identity import (
    API_KEYS_MAX,
    API_KEYS_OF_TENANT_MAX,
    EVERY_TENANT,
    ApiKey,
)
from shoal.model.report import Accepted, Answer, Refused, RemoveApiKey, SetApiKey


def change_api_keys(round_: Round, request: SetApiKey | RemoveApiKey) -> Answer:
    match request:
        case SetApiKey():
            return _add(round_, request)
        case RemoveApiKey():
            return _revoke(round_, request)


def callers_of(state: State) -> tuple[Caller, ...]:
    """Owners of keys, and of tokens of the cluster that were not void when this was asked. The
    proxy knows itself when one expires."""
    identity = state.identity
    users = [
        Caller(id=token.id, hash=token.hash, tenant=token.tenant, until_ms=token.until_ms)
        for token in identity.tokens.values()
        if not token.invite and not token.only and identity.role(token) is not None
    ]
    return (*users, *map(caller_of, identity.api_keys.values()))


def _add(round_: Round, request: SetApiKey) -> Answer:
    state, key = round_.state, request.key
    identity = state.identity
    known = identity.api_keys.get(key.id)
    if known is not None:
        same = known.hash == key.hash
        return Accepted(key.id) if same else Refused("key", f"there is a key {key.id} already")
    if request.scope not in (EVERY_TENANT, key.tenant):
        return Refused("tenant", f"your token is for {request.scope}; ask an admin")
    if key.tenant in identity.removed:
        return Refused("tenant", f"there is no tenant {key.tenant}; see: shoal tenant list")
    for name in key.services:
        service = state.services.get(name)
        if service is None or service.spec.replica.tenant != key.tenant:
            message = f"{key.tenant} has no service {name}; see: shoal services"
            return Refused("service", message, missing=True)
    if not key.lives(round_.now_ms):
        return Refused("expires", "is in the past; say when it ends, e.g. --expires 30d")
    _drop_expired(round_, key.tenant)
    own = sum(other.tenant == key.tenant for other in identity.api_keys.values())
    if own >= API_KEYS_OF_TENANT_MAX or len(identity.api_keys) >= API_KEYS_MAX:
        return Refused("key", f"{key.tenant} has {own} keys; revoke one that is not in use")
    made = _made(key, round_.now_ms, request.who)
    round_.emit(ApiKeyAdded(at_ms=round_.now_ms, tenant=key.tenant, key=made, who=request.who))
    return Accepted(key.id)


def _made(key: ApiKey, now_ms: int, who: str) -> ApiKey:
    return msgspec.structs.replace(key, since_ms=now_ms, who=who[:63])


def _revoke(round_: Round, request: RemoveApiKey) -> Answer:
    key = round_.state.identity.api_keys.get(request.key)
    if key is None or request.scope not in (EVERY_TENANT, key.tenant):
        message = f"there is no key {request.key[:64]}; see: shoal key list"
        return Refused("key", message, missing=True)
    round_.emit(ApiKeyRevoked(at_ms=round_.now_ms, tenant=key.tenant, key=key.id, who=request.who))
    return Accepted(key.id)


def _drop_expired(round_: Round, tenant: str) -> None:
    """Whoever makes a key every day would run into the bound."""
    for key in list(round_.state.identity.api_keys.values()):
        if key.tenant == tenant and not key.lives(round_.now_ms):
            round_.emit(
                ApiKeyRevoked(at_ms=round_.now_ms, tenant=tenant, key=key.id, why="it has expired")
            )


# -- what always holds, in code that shares nothing with the code above ----------------------------


def access_violation(state: State) -> str:
    for key in state.identity.api_keys.values():
        if key.tenant in state.identity.removed:
            return f"the key {key.id} has outlived its tenant"
    return ""
