"""Sign-in by OpenID Connect: a code flow for the page, a device flow for the command line."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shoal.api.access import Access, new_token
from shoal.api.audit import note, quiet
from shoal.api.handling import handles
from shoal.api.http import Cookie, Redirect, Request, Response
from shoal.api.oidc_provider import Claims, Provider
from shoal.api.principal import Principal
from shoal.api.problems import Refusal, accepted
from shoal.api.web import session_cookie
from shoal.calls.page import PageCalls
from shoal.calls.people import PeopleCalls
from shoal.control.alarms import Alarms
from shoal.control.loop import ControlLoop
from shoal.database.settings import Settings
from shoal.model.identity import EVERY_TENANT, Role, Token, User, role_in
from shoal.model.people import (
    DeviceAnswer,
    DeviceView,
    OidcConfig,
    OidcView,
    problem_with,
    roles_for,
)
from shoal.model.report import Refused, SetToken, SetUser
from shoal.model.views import Done
from shoal.ports import StoreError

LIFETIME_MS = 8 * 3600 * 1000  # of what a sign-in gives
PENDING_MS = 10 * 60 * 1000
PENDING_MAX = 1_000  # sign-ins that have begun in a browser
DEVICES_MAX = 100
PROVIDER_S = 30.0
SLOWER_MS = 5_000  # as the standard says
NAME = "oidc.json"  # a setting
NOTE = "sign-in by OpenID Connect"

Result = TypeVar("Result")
Word = Annotated[str, Meta(max_length=4000)]
_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="oidc")


class Pending(msgspec.Struct, frozen=True):
    """A sign-in that a browser has begun; only that browser has the cookie with `binding`."""

    nonce: str
    verifier: str
    redirect: str
    binding: str
    tenant: str
    until_ms: int


class Device(msgspec.Struct):
    code: str
    tenant: str
    until_ms: int
    interval_ms: int
    next_ms: int = 0


class SignIns:
    """The provider, and what has begun and not ended. A restart ends it: people begin again."""

    def __init__(
        self, settings: Settings | None, now_ms: Callable[[], int], alarms: Alarms
    ) -> None:
        self._settings = settings
        self._alarms = alarms
        self._now_ms = now_ms
        self._provider: Provider | None = None
        self._pending: dict[str, Pending] = {}
        self._devices: dict[str, Device] = {}
        if settings is not None:
            self._provider = self._read(settings)

    def _read(self, settings: Settings) -> Provider | None:
        try:
            found = settings.get(NAME)
            return Provider(msgspec.json.decode(found, type=OidcConfig)) if found else None
        except (StoreError, msgspec.DecodeError) as error:
            text = f"{NAME} cannot be read, so nobody signs in there ({error})"
            self._alarms.raise_("oidc", f"{text}; set it again with: shoal oidc set FILE")
            return None

    @property
    def on(self) -> bool:
        return self._provider is not None

    @property
    def provider(self) -> Provider:
        if self._provider is None:
            message = "this cluster has no sign-in by OpenID Connect; see: shoal oidc --help"
            raise Refusal(404, message)
        return self._provider

    def set(self, provider: Provider | None) -> None:
        if self._settings is None:
            raise Refusal(404, "this cluster has no home")
        if provider is None:
            self._settings.remove(NAME)
        else:
            self._settings.set(NAME, msgspec.json.encode(provider.config))
        self._alarms.clear("oidc")
        self._provider, self._pending, self._devices = provider, {}, {}

    def begin(self, redirect: str, tenant: str) -> tuple[str, Pending]:
        state = secrets.token_urlsafe(32)
        pending = Pending(
            nonce=secrets.token_urlsafe(32),
            verifier=secrets.token_urlsafe(48),
            redirect=redirect,
            binding=secrets.token_urlsafe(32),
            tenant=tenant,
            until_ms=self._now_ms() + PENDING_MS,
        )
        _bound(self._pending, PENDING_MAX)
        self._pending[state] = pending
        return state, pending

    def end(self, state: str, binding: str) -> Pending:
        """Once, in time, and in the browser that began it."""
        pending = self._pending.get(state)
        if pending is None or not hmac.compare_digest(binding.encode(), pending.binding.encode()):
            message = "this sign-in was not begun in this browser, or is over; begin again at /"
            raise Refusal(401, message)
        del self._pending[state]
        if pending.until_ms <= self._now_ms():
            raise Refusal(401, "this sign-in took too long; begin again at /")
        return pending

    def add_device(self, answer: dict[str, Any], tenant: str) -> DeviceView:
        try:
            view = DeviceView(
                handle=secrets.token_urlsafe(32),
                user_code=str(answer["user_code"])[:200],
                url=str(answer["verification_uri"])[:1000],
                url_complete=str(answer.get("verification_uri_complete", ""))[:1000],
                interval_ms=min(max(int(answer.get("interval", 5)), 0), 60) * 1000,
                expires_ms=min(int(answer["expires_in"]) * 1000, PENDING_MS),
            )
        except (KeyError, TypeError, ValueError):
            raise Refusal(502, "the provider's answer is not that of a device flow") from None
        _bound(self._devices, DEVICES_MAX)
        until_ms = self._now_ms() + view.expires_ms
        self._devices[view.handle] = Device(
            str(answer["device_code"]), tenant, until_ms, view.interval_ms
        )
        return view

    def device(self, handle: str) -> Device:
        device = self._devices.get(handle)
        if device is None or device.until_ms <= self._now_ms():
            self._devices.pop(handle, None)
            raise Refusal(404, "this sign-in is over; begin again with: shoal login --oidc")
        return device

    def may_poll(self, device: Device) -> bool:
        """A provider refuses those who ask too often."""
        now_ms = self._now_ms()
        if now_ms < device.next_ms:
            return False
        device.next_ms = now_ms + device.interval_ms
        return True

    def drop_device(self, handle: str) -> None:
        self._devices.pop(handle, None)


class OpenId:
    @handles(PeopleCalls.oidc)
    def shown(self, sign_ins: SignIns) -> OidcView:
        return _view(sign_ins.provider.config)

    @handles(PeopleCalls.set_oidc)
    async def set(self, sign_ins: SignIns, data: OidcConfig) -> OidcView:
        wrong = problem_with(data)
        if wrong is not None:
            field, _, message = wrong.partition(": ")
            raise Refusal(422, message, field)
        provider = Provider(data)
        await _aside(provider.discovery)
        await asyncio.to_thread(sign_ins.set, provider)
        return _view(data)

    @handles(PeopleCalls.remove_oidc)
    async def remove(self, sign_ins: SignIns) -> Done:
        issuer = sign_ins.provider.config.issuer
        await asyncio.to_thread(sign_ins.set, None)
        return Done(id=issuer)

    @handles(PageCalls.begin_sign_in)
    async def begin(
        self, request: Request, access: Access, sign_ins: SignIns, tenant: Word = ""
    ) -> Redirect:
        provider, redirect = sign_ins.provider, f"{request.base_url}v1/oidc/callback"
        state, pending = sign_ins.begin(redirect, tenant)
        where = await _aside(
            lambda: provider.way_to_sign_in(redirect, state, pending.nonce, pending.verifier)
        )
        cookie = _state_cookie(request, access, pending.binding, PENDING_MS // 1000)
        return Redirect(where, cookies=[cookie])

    @handles(PageCalls.end_sign_in)
    async def callback(
        self,
        request: Request,
        access: Access,
        loop: ControlLoop,
        sign_ins: SignIns,
        code: Word = "",
        state: Annotated[str, Meta(max_length=4000)] = "",
        error: Word = "",
        error_description: Word = "",
        iss: Word = "",
    ) -> Response[bytes]:
        note(request.scope, on=NOTE)
        provider = sign_ins.provider
        pending = sign_ins.end(state, request.cookies.get(_state_name(access), ""))
        await _aside(lambda: provider.check_sender(iss))
        if error or not code:
            reason = (error_description or error)[:200] or "it gave no code"
            raise Refusal(401, f"the provider refused: {reason}")
        claims = await _aside(
            lambda: provider.redeem(code, pending.redirect, pending.verifier, pending.nonce)
        )
        who, _ = await admit(loop, provider.config, claims, pending.tenant)
        note(request.scope, who=who.user, tenant=who.tenant, token=who.token)
        session, cookie = access.begin(request, who)
        seconds = (session.until_ms - loop.clock.now_ms()) // 1000
        over = _state_cookie(request, access, "", 0)
        return Redirect("/", cookies=[session_cookie(request, access, cookie, seconds), over])

    @handles(PeopleCalls.begin_device)
    async def device(self, sign_ins: SignIns, tenant: Word = "") -> DeviceView:
        answer = await _aside(sign_ins.provider.begin_device)
        return sign_ins.add_device(answer, tenant)

    @handles(PeopleCalls.poll_device)
    async def poll(
        self, request: Request, loop: ControlLoop, sign_ins: SignIns, handle: Word
    ) -> DeviceAnswer:
        note(request.scope, on=NOTE)  # not the handle: it is a secret
        device, provider = sign_ins.device(handle), sign_ins.provider
        if not sign_ins.may_poll(device):
            quiet(request.scope)
            return DeviceAnswer(interval_ms=device.interval_ms)
        try:
            found = await _aside(lambda: provider.poll_device(device.code))
        except Refusal as refusal:
            if refusal.status < 500:
                sign_ins.drop_device(handle)
            raise
        if isinstance(found, str):
            device.interval_ms += SLOWER_MS if found == "slow_down" else 0
            quiet(request.scope)
            return DeviceAnswer(interval_ms=device.interval_ms)
        sign_ins.drop_device(handle)
        who, secret = await admit(loop, provider.config, found, device.tenant)
        note(request.scope, who=who.user, tenant=who.tenant, token=who.token)
        return DeviceAnswer(secret=secret)


async def admit(
    loop: ControlLoop, config: OidcConfig, claims: Claims, tenant: str
) -> tuple[Principal, str]:
    """Adds the user or updates the user's roles, and adds a token for a working day."""
    await loop.settled()
    identity = loop.state.identity
    roles = roles_for(config, claims.groups, list(identity.tenants))
    known = identity.users.get(claims.name)
    try:
        user = msgspec.convert(
            {"name": claims.name, "roles": roles, "subject": claims.subject}, User
        )
    except msgspec.ValidationError:
        message = f"{claims.name[:64]!r} cannot be the name of a user"
        raise Refusal(403, f"{message}; set another user_claim: shoal oidc --help") from None
    if roles or (known is not None and known.subject == claims.subject):
        answer = await loop.request(SetUser(user, add=known is None, who=claims.name))
        if isinstance(answer, Refused):
            raise Refusal(403, answer.message, answer.field)
    if not roles:
        raise Refusal(403, "none of your groups has a role in this cluster; ask an admin")
    wanted = _tenant(roles, tenant)
    role = role_in(user, wanted) or Role.VIEWER
    token_id, secret, hash_ = new_token()
    token = Token(
        id=token_id,
        user=user.name,
        tenant=wanted,
        role=role,
        hash=hash_,
        until_ms=loop.clock.now_ms() + LIFETIME_MS,
        note=NOTE,
    )
    accepted(await loop.request(SetToken(token, who=user.name)))
    await loop.settled()
    return Principal(user=user.name, tenant=wanted, role=role, token=token_id), secret


def _tenant(roles: dict[str, Role], wanted: str) -> str:
    if not wanted:
        return EVERY_TENANT if EVERY_TENANT in roles else next(iter(roles))
    if wanted not in roles and EVERY_TENANT not in roles:
        raise Refusal(403, f"you have no role in {wanted[:64]}; ask an admin", "tenant")
    return wanted


def _view(config: OidcConfig) -> OidcView:
    return OidcView(
        issuer=config.issuer,
        client_id=config.client_id,
        has_secret=bool(config.client_secret),
        user_claim=config.user_claim,
        groups_claim=config.groups_claim,
        groups=config.groups,
    )


def _state_name(access: Access) -> str:
    return f"{access.cookie}-oidc"


def _state_cookie(request: Request, access: Access, value: str, seconds: int) -> Cookie:
    """Lax, because the browser comes back from another site."""
    return Cookie(
        key=_state_name(access),
        value=value,
        max_age=seconds,
        path="/v1/oidc",
        secure=request.secure,
        samesite="lax",
    )


def _bound(entries: dict[str, Any], most: int) -> None:
    while len(entries) >= most:
        del entries[next(iter(entries))]


async def _aside(work: Callable[[], Result]) -> Result:
    """In a thread of its own kind, so that a slow provider holds up nothing else."""
    loop = asyncio.get_running_loop()
    try:
        return await asyncio.wait_for(loop.run_in_executor(_threads, work), PROVIDER_S)
    except TimeoutError:
        raise Refusal(504, "the provider did not answer in time; try again") from None
