"""Secrets at the API: set, listed by name, removed. No request reads a value."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from shoal.api.handling import handles
from shoal.api.http import Request
from shoal.api.principal import Principal
from shoal.api.problems import Refusal
from shoal.calls.people import SecretCalls
from shoal.control.loop import ControlLoop
from shoal.control.secretstore import Sealed, SecretError, SecretStore, tenant_since_ms
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import DEFAULT_TENANT, JobSpec
from shoal.model.notice import secrets_named
from shoal.model.secret import (
    ENCRYPTION,
    SECRET_BYTES_MAX,
    SECRET_NAME_PATTERN,
    SecretView,
    split,
)
from shoal.model.service import ServiceSpec
from shoal.model.views import Done
from shoal.ports import StoreError

NAME = re.compile(SECRET_NAME_PATTERN)
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

Tenant = Annotated[str, Meta(max_length=63)]


class Secrets:
    """A viewer gets none of this: even the names say what a tenant works with."""

    @handles(SecretCalls.secrets)
    async def listing(
        self, loop: ControlLoop, who: Principal, tenant: Tenant = ""
    ) -> list[SecretView]:
        name, store = _tenant(who, tenant), _store(loop)
        found = store.listing(name, tenant_since_ms(loop.state.identity, name))
        uses = Counter(
            secret
            for job in (*loop.state.arrays.values(), *loop.state.jobs.values())
            if job.spec.tenant == name
            for secret in {split(wanted)[0] for wanted in job.spec.secrets}
        )
        problems = await asyncio.to_thread(lambda: [store.problem(one) for one in found])
        return [
            _view(one, uses[one.name], problem)
            for one, problem in zip(found, problems, strict=True)
        ]

    @handles(SecretCalls.set_secret, body_max=SECRET_BYTES_MAX + 1)
    async def set(
        self,
        request: Request,
        loop: ControlLoop,
        who: Principal,
        name: str,
        tenant: Tenant = "",
    ) -> SecretView:
        owner, store = _tenant(who, tenant), _store(loop)
        if not NAME.fullmatch(name):
            message = "begins with a letter, and has at most 63 letters, digits, '.', '_' and '-'"
            raise Refusal(422, message, "name")
        since_ms = tenant_since_ms(loop.state.identity, owner)
        value = await request.body()
        if not value:
            raise Refusal(422, "is empty; give the value on standard input", "value")
        if len(value) > SECRET_BYTES_MAX:
            raise Refusal(413, f"is longer than {SECRET_BYTES_MAX // 1024} KiB", "value")
        try:
            sealed = await asyncio.to_thread(
                store.put, owner, since_ms, name, value, by=who.user, now_ms=loop.clock.now_ms()
            )
        except SecretError as error:
            raise Refusal(422, str(error), "name") from None
        except StoreError as error:
            raise Refusal(507, f"cannot be kept: {error}", "value") from None
        return _view(sealed)

    @handles(SecretCalls.remove_secret)
    async def remove(
        self, loop: ControlLoop, who: Principal, name: str, tenant: Tenant = ""
    ) -> Done:
        owner, store = _tenant(who, tenant), _store(loop)
        since_ms = tenant_since_ms(loop.state.identity, owner)
        try:
            known = await asyncio.to_thread(store.remove, owner, since_ms, name)
        except StoreError as error:
            raise Refusal(507, f"cannot be removed: {error}", "name") from None
        if not known:
            message = f"{owner} has no secret {name[:64]!r}; see: shoal secret list"
            raise Refusal(404, message, "name")
        return Done(id=name)


def refuse_unknown_secrets(loop: ControlLoop, spec: JobSpec) -> None:
    """Before the job is taken: otherwise it would fail on its node, hours later perhaps."""
    for wanted in spec.secrets:
        name, _ = split(wanted)
        known = loop.secrets is not None and loop.secrets.find(
            spec.tenant, tenant_since_ms(loop.state.identity, spec.tenant), name
        )
        if not known:
            message = f"{spec.tenant} has no secret {name}; set it with: shoal secret set {name}"
            raise Refusal(422, message, "secrets")
    since_ms = tenant_since_ms(loop.state.identity, spec.tenant) if spec.encrypt else 0
    if spec.encrypt and not (loop.secrets and loop.secrets.find(spec.tenant, since_ms, ENCRYPTION)):
        fix = f"set it with: openssl rand -hex 32 | shoal secret set {ENCRYPTION}"
        raise Refusal(422, f"{spec.tenant} has no secret {ENCRYPTION}; {fix}", "encrypt")
    refuse_unknown_receivers(loop, spec.tenant, spec.notify)


def refuse_unknown_certificate(loop: ControlLoop, spec: ServiceSpec) -> None:
    tenant, name = spec.replica.tenant, spec.way.certificate
    if not NAME.fullmatch(name):
        return  # the step says what is wrong
    since_ms = tenant_since_ms(loop.state.identity, tenant)
    if loop.secrets is None or loop.secrets.find(tenant, since_ms, name) is None:
        message = f"{tenant} has no secret {name}; set it with: shoal secret set {name} < FILE"
        raise Refusal(422, message, "certificate")


def refuse_unknown_receivers(loop: ControlLoop, tenant: str, wishes: Iterable[str]) -> None:
    """Receivers of notices whose URL is a secret."""
    for name in secrets_named(wishes):
        since_ms = tenant_since_ms(loop.state.identity, tenant)
        if loop.secrets is None or loop.secrets.find(tenant, since_ms, name) is None:
            message = f"{tenant} has no secret {name}; set it with: shoal secret set {name}"
            raise Refusal(422, message, "notify")


def _tenant(who: Principal, asked: str) -> str:
    """An admin may name any tenant, others act for their own."""
    own = DEFAULT_TENANT if who.tenant == EVERY_TENANT else who.tenant
    if not asked or asked == own:
        return own
    if not who.admin:
        message = f"your token is for the tenant {own}; leave it out, or ask an admin"
        raise Refusal(403, message, "tenant")
    if not TENANT.fullmatch(asked):
        raise Refusal(422, "is not the name of a tenant", "tenant")
    return asked


def _view(sealed: Sealed, jobs: int = 0, problem: str = "") -> SecretView:
    return SecretView(
        name=sealed.name,
        tenant=sealed.tenant,
        version=sealed.version,
        set_ms=sealed.set_ms,
        by=sealed.by,
        jobs=jobs,
        problem=problem,
    )


def _store(loop: ControlLoop) -> SecretStore:
    if loop.secrets is None:
        raise Refusal(404, "this controller keeps no secrets")
    return loop.secrets
