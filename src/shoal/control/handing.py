"""Which secrets a node gets: those of the members that it is to start, and no others."""

from __future__ import annotations

from shoal.control.secretstore import SecretError, SecretStore
from shoal.core.state.state import State
from shoal.model.identity import Identity
from shoal.model.job import Job, MemberRef, Phase
from shoal.model.secret import (
    SealedSecrets,
    SecretsOf,
    SecretsWanted,
    SecretValue,
    registry_secret,
    split,
)
from shoal.sealing import seal

LAUNCH, KEY = "launch", "SHOAL_LAUNCH_KEY"  # by which the members of an attempt know each other
REFUSED = "the controller has not placed it there"


def tenant_since_ms(identity: Identity, tenant: str) -> int:
    """Secrets belong to a tenant as it was when they were set; 0: it has no record."""
    record = identity.tenants.get(tenant)
    return record.since_ms if record is not None else 0


def hand_over(
    store: SecretStore | None, state: State, node: str, wanted: SecretsWanted
) -> SealedSecrets | None:
    return seal(choose(store, state, node, wanted.incarnation, wanted.ref), wanted.public)


def choose(
    store: SecretStore | None, state: State, node: str, incarnation: int, ref: MemberRef
) -> SecretsOf:
    """An agent that asks for another's member, for one that has ended, or for an earlier life of
    its node gets nothing."""
    known, job = state.nodes.get(node), state.placed.get(node, {}).get(ref)
    stopping = job is not None and job.phase is Phase.STOPPING
    if known is None or known.incarnation != incarnation or job is None or stopping:
        return SecretsOf(ref, problem=REFUSED)
    if store is None:
        return SecretsOf(ref, problem="this controller keeps no secrets")
    return _of_member(store, state, job, ref)


def _of_member(store: SecretStore, state: State, job: Job, ref: MemberRef) -> SecretsOf:
    tenant, since_ms = job.spec.tenant, tenant_since_ms(state.identity, job.spec.tenant)
    values, registry = [], b""
    try:
        for wanted in job.spec.secrets:
            name, variable = split(wanted)
            values.append(SecretValue(name, store.value(tenant, since_ms, name), variable))
        if job.spec.launcher:
            values.append(
                SecretValue(LAUNCH, store.derived(f"launch {ref.job} {ref.attempt}"), KEY)
            )
        name = registry_secret(job.spec.image) if job.spec.image else ""
        if name and store.find(tenant, since_ms, name) is not None:
            registry = store.value(tenant, since_ms, name)
    except SecretError as error:
        return SecretsOf(ref, problem=str(error))
    return SecretsOf(ref, tuple(values), registry)
