"""What a user who is removed leaves behind, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.api.problems import Refusal
from shoal.control.loop import ControlLoop
from shoal.control.secretstore import tenant_since_ms
from shoal.model.ids import array_of
from shoal.model.people import LeavingView, Left

LEFT_MAX = 1_000


def leaving(loop: ControlLoop, user: str, *, end: bool, heir: str) -> LeavingView:
    if user not in loop.state.identity.users:
        raise Refusal(404, f"there is no user {user[:64]}; see: shoal user list", "user")
    left = list(_left(loop, user, end, heir))
    return LeavingView(id=user, left=left[:LEFT_MAX], more=max(0, len(left) - LEFT_MAX))


def _left(loop: ControlLoop, user: str, end: bool, heir: str) -> Iterator[Left]:
    state = loop.state
    for job in (*state.arrays.values(), *state.jobs.values()):
        if job.spec.user == user and not job.spec.service and array_of(job.id) not in state.arrays:
            yield Left(
                kind="job",
                id=job.id,
                name=job.spec.name or "",
                tenant=job.spec.tenant,
                state=job.phase.value,
                then="is cancelled" if end else "continues",
            )
    for service in state.services.values():
        if service.spec.replica.user == user:
            yield Left(
                kind="service",
                id=service.spec.name,
                tenant=service.spec.replica.tenant,
                then="is stopped" if end else "continues",
            )
    for schedule in state.schedules.values():
        if schedule.owner == user:
            then = f"goes to {heir}" if heir else "is paused"
            yield Left(
                kind="schedule",
                id=schedule.spec.name,
                tenant=schedule.spec.tenant,
                state="" if schedule.next_ms else "paused",
                then=then if schedule.next_ms else "stays paused",
            )
    identity = state.identity
    for token in identity.tokens.values():
        if token.user == user:
            kind = "invite" if token.invite else token.note
            yield Left(kind="token", id=token.id, name=kind, tenant=token.tenant, then="is revoked")
    for rule in state.rules.values():
        if rule.owner == user:
            yield Left(kind="notice", id=rule.id, tenant=rule.tenant, then="is removed")
    if loop.secrets is None:
        return
    for tenant in sorted(identity.tenants):
        for secret in loop.secrets.listing(tenant, tenant_since_ms(identity, tenant)):
            if secret.by == user:
                yield Left(kind="secret", id=secret.name, tenant=tenant, then="stays the tenant's")
