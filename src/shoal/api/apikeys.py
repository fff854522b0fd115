"""The API of keys for services. Members of the tenant that owns the services manage them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shoal.api.access import new_api_key
from shoal.api.audit import note
from shoal.api.handling import handles
from shoal.api.http import Request
from shoal.api.principal import Principal
from shoal.api.problems import Refusal, accepted
from shoal.calls.people import PeopleCalls
from shoal.control.loop import ControlLoop
from shoal.core.state.state import State
from shoal.model.identity import EVERY_TENANT, ApiKey
from shoal.model.job import DEFAULT_TENANT
from shoal.model.people import ApiKeyView, NewApiKey, SecretApiKeyView
from shoal.model.report import RemoveApiKey, SetApiKey
from shoal.model.views import Done

Word = Annotated[str, Meta(max_length=64)]


class ApiKeys:
    @handles(PeopleCalls.api_keys)
    def listing(self, loop: ControlLoop, who: Principal, service: Word = "") -> list[ApiKeyView]:
        seen = [key for key in loop.state.identity.api_keys.values() if who.sees(key.tenant)]
        if service:
            tenant = _owner(loop.state, who, service)
            seen = [
                key
                for key in seen
                if key.tenant == tenant and service in (key.services or (service,))
            ]
        now_ms = loop.clock.now_ms()
        held = loop.state.accounts.held_keys
        views = [_view(key, now_ms, spent=key.id in held) for key in seen]
        return sorted(views, key=lambda view: (view.tenant, view.user, view.since_ms, view.id))

    @handles(PeopleCalls.add_api_key)
    async def add(
        self, request: Request, loop: ControlLoop, who: Principal, data: NewApiKey
    ) -> SecretApiKeyView:
        key_id, secret, hash_ = new_api_key()
        user = data.user or who.user
        key = ApiKey(
            id=key_id,
            hash=hash_,
            tenant=_tenant(loop.state, who, data),
            services=tuple(dict.fromkeys(data.services)),
            user=user,
            tokens=data.tokens,
            per=data.per,
            rpm=data.rpm,
            until_ms=loop.clock.now_ms() + data.lifetime_ms if data.lifetime_ms else 0,
        )
        note(request.scope, on=f"{key_id} of {user}")
        accepted(await loop.request(SetApiKey(key, _scope(who), who.user)))
        await loop.settled()
        known = loop.state.identity.api_keys.get(key_id)
        if known is None:  # somebody was quicker
            raise Refusal(404, f"there is no key {key_id}; see: shoal key list", "key")
        return SecretApiKeyView(key=_view(known, loop.clock.now_ms()), secret=secret)

    @handles(PeopleCalls.revoke_api_key)
    async def revoke(self, loop: ControlLoop, who: Principal, key_id: Word) -> Done:
        return Done(id=accepted(await loop.request(RemoveApiKey(key_id, _scope(who), who.user))).id)


def _scope(who: Principal) -> str:
    return EVERY_TENANT if who.admin else who.tenant


def _owner(state: State, who: Principal, name: str) -> str:
    service = state.services.get(name)
    if service is None or not who.sees(service.spec.replica.tenant):
        raise Refusal(404, f"there is no service {name!r}; see: shoal services", "service")
    return service.spec.replica.tenant


def _tenant(state: State, who: Principal, data: NewApiKey) -> str:
    """That of the services; the step finds those that are not of the same."""
    own = DEFAULT_TENANT if who.tenant == EVERY_TENANT else who.tenant
    if data.services:
        found = _owner(state, who, data.services[0])
        if data.tenant not in (None, found):
            raise Refusal(422, f"{data.services[0]} is of the tenant {found}", "tenant")
        return found
    if data.tenant not in (None, own) and not who.admin:
        raise Refusal(403, f"your token is for the tenant {own}; ask an admin", "tenant")
    return data.tenant or own


def _view(key: ApiKey, now_ms: int, *, spent: bool = False) -> ApiKeyView:
    void = "has used up its tokens" if spent else ""
    return ApiKeyView(
        id=key.id,
        tenant=key.tenant,
        services=key.services,
        user=key.user,
        tokens=key.tokens,
        per=key.per,
        rpm=key.rpm,
        since_ms=key.since_ms,
        until_ms=key.until_ms,
        who=key.who,
        void=void if key.lives(now_ms) else "expired",
    )
