"""The cluster as one sender may see and change it. Handlers reach jobs and services through this
alone, so that what a sender may not see cannot be found by accident."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.api.principal import Principal
from shoal.api.problems import Refusal
from shoal.control.loop import ControlLoop
from shoal.model.identity import EVERY_TENANT
from shoal.model.job import DEFAULT_TENANT, Job, JobSpec
from shoal.model.service import Service

SOMEBODY = "a user"  # the operator, in reasons that everybody may read


class Reach:
    def __init__(self, loop: ControlLoop, who: Principal) -> None:
        self.loop = loop
        self.who = who

    # -- what the sender may see ---------------------------------------------------------------

    def sees(self, job: Job) -> bool:
        return self.who.sees(job.spec.tenant)

    def find(self, job_id: str) -> Job | None:
        """The job, whether live, just ending or long finished."""
        job = self.loop.state.jobs.get(job_id) or self.loop.store.job(job_id)
        return job if job is not None and self.sees(job) else None

    def job(self, job_id: str) -> Job:
        job = self.find(job_id)
        if job is None:
            raise Refusal(404, f"there is no job {job_id[:64]!r}; see: shoal ps -a", "job")
        return job

    def jobs(self) -> Iterable[Job]:
        """The live ones."""
        jobs = self.loop.state.jobs.values()
        return jobs if self.who.sees_all else [job for job in jobs if self.sees(job)]

    def service(self, name: str) -> Service:
        service = self.loop.state.services.get(name)
        if service is None or not self.who.sees(service.spec.replica.tenant):
            raise Refusal(404, f"there is no service {name[:64]!r}; see: shoal services", "service")
        return service

    def services(self) -> list[Service]:
        found = self.loop.state.services.values()
        return [service for service in found if self.who.sees(service.spec.replica.tenant)]

    # -- what the sender may change ------------------------------------------------------------

    @property
    def tenant(self) -> str:
        """The only tenant that the sender's requests may change; "*": any. The step verifies it
        again: between this request and its step, a tenant or a service may go."""
        return EVERY_TENANT if self.who.admin else self.who.tenant

    @property
    def name(self) -> str:
        """Who does it, for the reason in an event."""
        return self.who.user if self.who.token else SOMEBODY

    def spec(self, spec: JobSpec) -> JobSpec:
        """Tenant and user come from the token. Clients send the default tenant if none is named."""
        who = self.who
        own = DEFAULT_TENANT if who.tenant == EVERY_TENANT else who.tenant
        tenant = own if spec.tenant == DEFAULT_TENANT else spec.tenant
        if who.admin:
            user = spec.user or (who.user if who.token else "")
            return msgspec.structs.replace(spec, tenant=tenant, user=user)
        if tenant != own:
            message = f"your token is for the tenant {own}; leave the field out, or ask an admin"
            raise Refusal(403, message, "tenant")
        return msgspec.structs.replace(spec, tenant=own, user=who.user)


def scoped_key(spec: JobSpec, key: str) -> str:
    """Submission keys are each tenant's own: nobody learns of, or gets, a job by its key."""
    return f"{spec.tenant}/{key}" if key and spec.tenant != DEFAULT_TENANT else key
