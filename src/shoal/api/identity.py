"""The API of tenants, users and tokens. Admins manage all; others only their own tokens."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.api.access import new_token
from shoal.api.audit import note
from shoal.api.handling import handles
from shoal.api.http import Request
from shoal.api.leaving import leaving
from shoal.api.principal import Principal
from shoal.api.problems import Refusal, accepted
from shoal.calls.people import PeopleCalls
from shoal.control.loop import ControlLoop
from shoal.model.identity import EVERY_TENANT, Identity, Role, TenantRecord, Token, User, role_in
from shoal.model.people import (
    LeavingView,
    MeView,
    NewTenant,
    NewToken,
    NewUser,
    Roles,
    Rotation,
    SecretTokenView,
    TenantView,
    TokenView,
    UserView,
)
from shoal.model.report import (
    AddTenant,
    RemoveTenant,
    RemoveToken,
    RemoveUser,
    SetToken,
    SetUser,
)
from shoal.model.views import Done

Word = Annotated[str, Meta(max_length=64)]


class Me:
    @handles(PeopleCalls.me)
    def me(self, loop: ControlLoop, who: Principal) -> MeView:
        token = loop.state.identity.tokens.get(who.token)
        until_ms = token.until_ms if token is not None else 0
        return MeView(
            user=who.user, tenant=who.tenant, role=who.role, token=who.token, until_ms=until_ms
        )


class Tenants:
    @handles(PeopleCalls.tenants)
    def listing(self, loop: ControlLoop) -> list[TenantView]:
        identity = loop.state.identity
        users = Counter(name for user in identity.users.values() for name in user.roles)
        jobs = Counter(job.spec.tenant for job in loop.state.jobs.values())
        return [
            _tenant_view(record, users[name], jobs[name])
            for name, record in sorted(identity.tenants.items())
        ]

    @handles(PeopleCalls.add_tenant)
    async def add(
        self, request: Request, loop: ControlLoop, who: Principal, data: NewTenant
    ) -> TenantView:
        note(request.scope, on=data.name)
        answer = accepted(await loop.request(AddTenant(data.name, data.uid, who.user)))
        await loop.settled()
        record = loop.state.identity.tenants.get(answer.id)
        if record is None:  # removed since
            raise Refusal(404, f"there is no tenant {answer.id}; see: shoal tenant list", "tenant")
        return _tenant_view(record, 0, 0)

    @handles(PeopleCalls.remove_tenant)
    async def remove(self, loop: ControlLoop, who: Principal, name: Word) -> Done:
        return Done(id=accepted(await loop.request(RemoveTenant(name, who.user))).id)


class Users:
    @handles(PeopleCalls.users)
    def listing(self, loop: ControlLoop) -> list[UserView]:
        identity = loop.state.identity
        tokens = Counter(token.user for token in identity.tokens.values())
        return [_user_view(user, tokens[name]) for name, user in sorted(identity.users.items())]

    @handles(PeopleCalls.add_user)
    async def add(
        self, request: Request, loop: ControlLoop, who: Principal, data: NewUser
    ) -> UserView:
        note(request.scope, on=data.name)
        user = User(name=data.name, roles=data.roles)
        answer = accepted(await loop.request(SetUser(user, add=True, who=who.user)))
        await loop.settled()
        return _one_user(loop, answer.id)

    @handles(PeopleCalls.set_user)
    async def change(self, loop: ControlLoop, who: Principal, name: Word, data: Roles) -> UserView:
        user = User(name=name, roles=data.roles)
        answer = accepted(await loop.request(SetUser(user, who=who.user)))
        await loop.settled()
        return _one_user(loop, answer.id)

    @handles(PeopleCalls.remove_user)
    async def remove(
        self, loop: ControlLoop, who: Principal, name: Word, end: bool = False, heir: Word = ""
    ) -> LeavingView:
        left = leaving(loop, name, end=end, heir=heir)
        accepted(await loop.request(RemoveUser(name, who.user, end, heir)))
        return left

    @handles(PeopleCalls.leaving)
    def leaving(
        self, loop: ControlLoop, name: Word, end: bool = False, heir: Word = ""
    ) -> LeavingView:
        return leaving(loop, name, end=end, heir=heir)


class Tokens:
    """Whoever is not an admin has only tokens of their own, in the tenant of the token they use."""

    @handles(PeopleCalls.tokens)
    def listing(self, loop: ControlLoop, who: Principal) -> list[TokenView]:
        tokens = loop.state.identity.tokens.values()
        seen = [token_view(loop, token) for token in tokens if _may_see(who, token)]
        return sorted(seen, key=lambda view: (view.user, view.since_ms, view.id))

    @handles(PeopleCalls.add_token)
    async def add(
        self, request: Request, loop: ControlLoop, who: Principal, data: NewToken
    ) -> SecretTokenView:
        identity = loop.state.identity
        user = identity.users.get(data.user or who.user)
        if user is None or not (who.admin or user.name == who.user):
            raise Refusal(404, _no_user(data.user, who), "user")
        tenant = chosen_tenant(who, user, data)
        role = data.role or role_in(user, tenant) or Role.VIEWER
        if not who.admin:
            role = _bounded_role(who, tenant, role, data.role)
        token_id, secret, hash_ = new_token()
        token = Token(
            id=token_id,
            user=user.name,
            tenant=tenant,
            role=role,
            hash=hash_,
            until_ms=_until_ms(loop, who, data.lifetime_ms),
            note=data.note,
            only=data.only,
        )
        note(request.scope, on=f"{token_id} of {user.name}")
        accepted(await loop.request(SetToken(token, who=who.user)))
        return await shown_once(loop, token_id, secret)

    @handles(PeopleCalls.rotate_token)
    async def rotate(
        self, loop: ControlLoop, who: Principal, token_id: Word, data: Rotation
    ) -> SecretTokenView:
        before = _own(loop, who, token_id)
        if not who.admin and before.role.rank > who.role.rank:
            raise Refusal(403, f"is for the role {before.role.value}; ask an admin", "token")
        until_ms = before.until_ms
        if data.lifetime_ms is not None:
            until_ms = _until_ms(loop, who, data.lifetime_ms)
        elif not who.admin:
            until_ms = _earlier(until_ms, _ends_ms(loop, who))
        _, secret, hash_ = new_token(token_id)
        token = msgspec.structs.replace(before, hash=hash_, until_ms=until_ms)
        accepted(await loop.request(SetToken(token, rotate=True, who=who.user)))
        return await shown_once(loop, token_id, secret)

    @handles(PeopleCalls.remove_token)
    async def remove(self, loop: ControlLoop, who: Principal, token_id: Word) -> Done:
        token = _own(loop, who, token_id)
        return Done(id=accepted(await loop.request(RemoveToken(token.id, who.user))).id)


async def shown_once(loop: ControlLoop, token_id: str, secret: str) -> SecretTokenView:
    await loop.settled()
    token = loop.state.identity.tokens.get(token_id)
    if token is None:  # an admin was quicker
        raise Refusal(404, _no_token(token_id), "token")
    return SecretTokenView(token=token_view(loop, token), secret=secret)


def _may_see(who: Principal, token: Token) -> bool:
    return who.admin or (token.user == who.user and who.sees(token.tenant))


def _own(loop: ControlLoop, who: Principal, token_id: str) -> Token:
    token = loop.state.identity.tokens.get(token_id)
    if token is None or not _may_see(who, token):
        raise Refusal(404, _no_token(token_id), "token")
    return token


def _no_token(token_id: str) -> str:
    return f"there is no token {token_id[:64]}; see: shoal token list"


def _no_user(named: str | None, who: Principal) -> str:
    if named is None:
        return f"{who.user} is not a user; name one, e.g. shoal token add ann"
    return f"there is no user {named}; see: shoal user list"


def chosen_tenant(who: Principal, user: User, data: NewToken) -> str:
    """A token that acts for one tenant gives access to no other."""
    if not who.admin and not who.sees_all:
        if data.tenant not in (None, who.tenant):
            raise Refusal(403, f"your token is for {who.tenant}; ask an admin", "tenant")
        return who.tenant
    if data.tenant is not None:
        return data.tenant
    if not user.roles:
        message = f"{user.name} has no role yet; add one with: shoal user set {user.name}"
        raise Refusal(422, f"{message} --tenant TENANT", "tenant")
    if len(user.roles) > 1 and EVERY_TENANT not in user.roles:
        names = ", ".join(sorted(user.roles))
        raise Refusal(422, f"{user.name} has roles in {names}; name one of them", "tenant")
    return EVERY_TENANT if EVERY_TENANT in user.roles else next(iter(user.roles))


def _bounded_role(who: Principal, tenant: str, role: Role, named: Role | None) -> Role:
    if role.rank <= who.role.rank:
        return role
    if named is None:
        return who.role
    where = "every tenant" if tenant == EVERY_TENANT else tenant
    raise Refusal(403, f"your token is for the role {who.role.value} in {where}", "role")


def _until_ms(loop: ControlLoop, who: Principal, lifetime_ms: int) -> int:
    until_ms = loop.clock.now_ms() + lifetime_ms if lifetime_ms else 0
    return until_ms if who.admin else _earlier(until_ms, _ends_ms(loop, who))


def _ends_ms(loop: ControlLoop, who: Principal) -> int:
    """Otherwise whoever finds a token that is about to expire could make one that does not."""
    token = loop.state.identity.tokens.get(who.token)
    return token.until_ms if token is not None else 0


def _earlier(one_ms: int, other_ms: int) -> int:
    """0 is never."""
    return min(one_ms, other_ms) if one_ms and other_ms else one_ms or other_ms


def _tenant_view(record: TenantRecord, users: int, jobs: int) -> TenantView:
    return TenantView(
        name=record.name, uid=record.uid, since_ms=record.since_ms, users=users, jobs=jobs
    )


def _user_view(user: User, tokens: int) -> UserView:
    return UserView(name=user.name, roles=user.roles, since_ms=user.since_ms, tokens=tokens)


def _one_user(loop: ControlLoop, name: str) -> UserView:
    identity = loop.state.identity
    user = identity.users.get(name)
    if user is None:  # removed since
        raise Refusal(404, f"there is no user {name}; see: shoal user list", "user")
    return _user_view(user, sum(token.user == name for token in identity.tokens.values()))


def token_view(loop: ControlLoop, token: Token) -> TokenView:
    return TokenView(
        id=token.id,
        user=token.user,
        tenant=token.tenant,
        role=token.role,
        since_ms=token.since_ms,
        until_ms=token.until_ms,
        note=token.note,
        invite=token.invite,
        only=token.only,
        void=_void(loop.state.identity, token, loop.clock.now_ms()),
    )


def _void(identity: Identity, token: Token, now_ms: int) -> str:
    if 0 < token.until_ms <= now_ms:
        return "expired"
    if identity.role(token) is None:
        return f"{token.user} has no role in {token.tenant}"
    return ""
