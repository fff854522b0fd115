"""What a service may have of the gateway that all tenants share: hosts, paths and ports."""

from __future__ import annotations

from shoal.core.state.state import State
from shoal.model.identity import EVERY_TENANT
from shoal.model.policy import grants_host, grants_port
from shoal.model.report import Refused, SetService
from shoal.model.service import Claims, Route, Service


def within(scope: str, service: Service) -> bool:
    return scope in (EVERY_TENANT, service.spec.replica.tenant)


def owner_of(state: State, tenant: str) -> str:
    """Empty for the operator, and in a cluster that keeps no tenants apart."""
    known = tenant in state.identity.tenants or tenant in state.identity.removed
    return tenant if known else ""


def taken(state: State, request: SetService) -> Refused | None:
    """With two services at one address, the gateway could serve neither. A service that may still
    go back to its version before keeps that address too."""
    spec, claims = request.spec, Claims()
    others = [one for one in state.services.values() if one.spec.name != spec.name]
    for other in others:
        for known in (other.before, other.spec):
            if known is not None:
                claims.add(known.way, owner_of(state, known.replica.tenant))
    clash = claims.clash(spec.way, owner_of(state, spec.replica.tenant))
    if clash is None:
        return None
    seen = within(request.scope, state.services[clash.holder])
    by = f"service {clash.holder}" if seen else "another tenant"
    return Refused(clash.field, f"{clash.claim} is already used by {by}")


def ungranted(state: State, request: SetService) -> Refused | None:
    """A host, a port and a certificate of its own take a part of what all tenants share, so a
    tenant that was added needs them granted. What an admin has set for the service may stay."""
    spec, tenant = request.spec, request.spec.replica.tenant
    if request.scope == EVERY_TENANT or tenant not in state.identity.tenants:
        return None
    known, way = state.services.get(spec.name), spec.way
    before = [one.way for one in (known.spec, known.before) if one] if known is not None else []
    lineage = state.accounts.lineage(tenant)
    for field, grant, granted in (
        ("host", f"hosts: {way.host}", grants_host(lineage, way.host)),
        ("port", f"ports: {way.port}", grants_port(lineage, way.port)),
        ("certificate", f"ports: {way.port}", grants_port(lineage, way.port)),
    ):
        value = getattr(way, field)
        if value and not granted and not _had(before, field, value):
            fix = f"an admin may grant it in the policy: tenants: {{{tenant}: {{{grant}}}}}"
            return Refused(field, f"{value} is not granted to {tenant}; {fix}")
    return None


def _had(before: list[Route], field: str, value: object) -> bool:
    return any(getattr(one, field) == value for one in before)
