"""The truth about caps: nothing is accepted that its tenant, or an ancestor, has no room for."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec

from shoal.core.state.events.arrays import ArrayFinished, ArrayRetried, ArraySubmitted
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.log import Event
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobAdopted, JobFinished, JobPlaced, JobRequeued
from shoal.core.state.events.services import ServiceSet, ServiceStopped
from shoal.core.state.events.sleep import JobWaking
from shoal.model.ids import array_of
from shoal.model.policy import Policy, Tenant
from storm.jobtruth import JobTruth
from storm.lives import Untruth

CAPPED_PART = 0.25  # of the histories have tenants with caps


def capped(rng: random.Random, policy: Policy) -> Policy:
    """In some histories the tenants may have only few jobs and few GPUs."""
    if rng.random() > CAPPED_PART:
        return policy
    tenants = policy.tenants or (Tenant(name="red"), Tenant(name="default"))
    some = tuple(
        msgspec.structs.replace(
            tenant, jobs_max=rng.choice((0, 2, 4)), waiting_max=rng.choice((0, 1, 3))
        )
        for tenant in tenants
    )
    some = tuple(
        msgspec.structs.replace(tenant, gpus_max=rng.choice((0, 1, 1, 2, 4))) for tenant in some
    )
    return msgspec.structs.replace(policy, tenants=some)


def without_gpu_caps(policy: Policy) -> Policy:
    """Jobs that were there before a cap was lowered may be too large for it, and wait forever."""
    tenants = tuple(msgspec.structs.replace(one, gpus_max=0) for one in policy.tenants)
    return msgspec.structs.replace(policy, tenants=tenants)


class CapTruth:
    def __init__(self, policy: Policy, jobs: Mapping[str, JobTruth]) -> None:
        self._policy, self._jobs = policy, jobs
        self._tenants: dict[str, str] = {}  # of live jobs, without replicas
        self._waiting: dict[str, None] = {}
        self._services: dict[str, tuple[str, int]] = {}  # tenant, most replicas

    def see(self, event: Event) -> None:
        match event:
            case PolicyChanged():
                self._policy = event.policy
            case ArraySubmitted():
                self._tenants[event.job] = event.spec.tenant
                self._verify(event.job, event.spec.tenant)
            case ArrayRetried() if event.record is not None:
                self._tenants[event.job] = event.record.spec.tenant
                self._verify(event.job, event.record.spec.tenant)
            case ArrayFinished():
                del self._tenants[event.job]
            case JobSubmitted() if not event.spec.service:
                # An array counts as one job without any: its first element takes that place.
                first = bool(event.spec.array) and not any(
                    array_of(job) == event.spec.array for job in self._tenants
                )
                self._tenants[event.job] = event.spec.tenant
                self._waiting[event.job] = None
                self._verify(event.job, event.spec.tenant, more=not first)
            case JobPlaced() | JobAdopted():
                self._waiting.pop(event.job, None)
                self._verify_gpus(event.job)
            case JobWaking():
                self._verify_gpus(event.job)
            case JobRequeued() if event.job in self._tenants:
                self._waiting[event.job] = None
            case JobFinished():
                self._waiting.pop(event.job, None)
                self._tenants.pop(event.job, None)
            case ServiceSet():
                self._set(event)
            case ServiceStopped():
                del self._services[event.service]

    def _set(self, event: ServiceSet) -> None:
        tenant, most = event.spec.replica.tenant, event.spec.scale.most
        before = self._services.get(event.service, ("", 0))
        self._services[event.service] = (tenant, most)
        if not event.back and (before[0] != tenant or before[1] < most):
            self._verify(event.service, tenant)

    def _verify(self, what: str, name: str, *, more: bool = True) -> None:
        seen: list[str] = []
        while name and name not in seen:
            tenant = self._policy.tenant(name)
            live, waiting = self._count(name)
            if more and tenant.jobs_max and live > tenant.jobs_max:
                raise Untruth(f"{what} is one of {live} jobs of {name}: too many by its cap")
            is_job = what in self._waiting
            if is_job and tenant.waiting_max and waiting > tenant.waiting_max:
                raise Untruth(
                    f"{what} is one of {waiting} that wait of {name}: too many by its cap"
                )
            seen.append(name)
            name = tenant.parent

    def _verify_gpus(self, what: str) -> None:
        """It has just been given GPUs: its tenant must hold no more than it may."""
        job = self._jobs[what]
        for tenant in self._policy.tenants if job.spec.gpus else ():
            if tenant.gpus_max and self._is_under(job.spec.tenant, tenant.name):
                held = sum(
                    len(slice_.gpus) * slice_.gpu_milli
                    for other in self._jobs.values()
                    if not other.asleep and self._is_under(other.spec.tenant, tenant.name)
                    for slice_ in other.held
                )
                if held > 1000 * tenant.gpus_max:
                    raise Untruth(f"{what} was given GPUs: {tenant.name} now holds {held} milli")

    def _count(self, top: str) -> tuple[int, int]:
        mine = [job for job, name in self._tenants.items() if self._is_under(name, top)]
        services = [most for name, most in self._services.values() if self._is_under(name, top)]
        shared = {array_of(job) for job in mine} - {""}  # an array counts as its first element
        return len(mine) - len(shared) + sum(services), sum(job in self._waiting for job in mine)

    def _is_under(self, name: str, top: str) -> bool:
        seen: list[str] = []
        while name and name not in seen:
            if name == top:
                return True
            seen.append(name)
            name = self._policy.tenant(name).parent
        return False
