"""The API of invites: a code that somebody accepts once, on the page or in the terminal."""

from __future__ import annotations

import msgspec

from shoal.api.access import INVITE_OVER, Access, new_invite, new_token
from shoal.api.audit import note
from shoal.api.handling import handles
from shoal.api.http import Request
from shoal.api.identity import chosen_tenant, shown_once, token_view
from shoal.api.joining import FINGERPRINT
from shoal.api.principal import Principal
from shoal.api.problems import Refusal, accepted
from shoal.calls.people import PeopleCalls
from shoal.control.loop import ControlLoop
from shoal.model.identity import EVERY_TENANT, Role, Token, User, role_in
from shoal.model.people import InviteCode, InviteView, NewInvite, NewToken, SecretTokenView
from shoal.model.report import Refused, SetToken, SetUser

LIFETIME_MS = 90 * 86_400_000  # of the token that an invite becomes
BODY_BYTES_MAX = 16 * 1024  # the client has not shown a token yet


class Invites:
    @handles(PeopleCalls.invite)
    async def invite(
        self, request: Request, loop: ControlLoop, who: Principal, data: NewInvite
    ) -> InviteView:
        user = await _user(loop, who, data)
        asked = NewToken(user=user.name, tenant=data.tenant, role=data.role)
        tenant = EVERY_TENANT if data.role is Role.ADMIN else chosen_tenant(who, user, asked)
        invite_id, code, hash_ = new_invite()
        token = Token(
            id=invite_id,
            user=user.name,
            tenant=tenant,
            role=data.role or role_in(user, tenant) or Role.VIEWER,
            hash=hash_,
            until_ms=loop.clock.now_ms() + data.lifetime_ms,
            note="invite",
            invite=True,
        )
        note(request.scope, on=f"{invite_id} of {user.name}")
        accepted(await loop.request(SetToken(token, who=who.user)))
        await loop.settled()
        known = loop.state.identity.tokens.get(invite_id)
        if known is None:  # removed since
            raise Refusal(404, f"there is no invite {invite_id}; see: shoal token list", "token")
        found = request.app.state.get(FINGERPRINT)
        shown = str(found()) if found is not None else ""
        return InviteView(token=token_view(loop, known), code=code, fingerprint=shown)

    @handles(PeopleCalls.accept_invite, body_max=BODY_BYTES_MAX)
    async def accept(
        self, request: Request, access: Access, loop: ControlLoop, data: InviteCode
    ) -> SecretTokenView:
        token, secret = await accept(request, access, loop, data.code)
        return await shown_once(loop, token.id, secret)


async def accept(
    request: Request, access: Access, loop: ControlLoop, code: str
) -> tuple[Token, str]:
    """The token that the invite has become, and its secret. Of two who try at the same moment, one
    gets it: the core decides, and it is stored before this returns."""
    await access.settled()
    invite = access.invite(request, code)
    note(request.scope, who=invite.user, tenant=invite.tenant, token=invite.id, on=invite.id)
    _, secret, hash_ = new_token(invite.id)
    until_ms = loop.clock.now_ms() + LIFETIME_MS
    token = msgspec.structs.replace(invite, hash=hash_, until_ms=until_ms, invite=False)
    wish = SetToken(token, rotate=True, accepts=invite.hash, who=invite.user)
    if isinstance(await loop.request(wish), Refused):
        raise access.guessed(request, INVITE_OVER)
    await loop.settled()
    return token, secret


async def _user(loop: ControlLoop, who: Principal, data: NewInvite) -> User:
    known = loop.state.identity.users.get(data.user)
    if known is not None:
        return known
    role = data.role or Role.MEMBER
    tenant = EVERY_TENANT if role is Role.ADMIN else data.tenant
    if tenant is None:
        raise Refusal(422, f"a {role.value} needs one, e.g. lab", "tenant")
    user = User(name=data.user, roles={tenant: role})
    accepted(await loop.request(SetUser(user, add=True, who=who.user)))
    return user
