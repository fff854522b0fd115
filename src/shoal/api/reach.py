"""The cluster as one sender may see and change it. Handlers reach jobs and services through this
alone, so that what a sender may not see cannot be found by accident."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from functools import cached_property

import msgspec

from shoal.api.handling import aside
from shoal.api.http import Connection
from shoal.api.principal import Principal
from shoal.api.problems import Refusal
from shoal.control.loop import ControlLoop
from shoal.core.answers.holders import holders_text
from shoal.core.answers.waits import waits_of
from shoal.core.state.events.log import Recorded
from shoal.model.identity import EVERY_TENANT
from shoal.model.ids import array_of
from shoal.model.job import DEFAULT_TENANT, Job, JobSpec
from shoal.model.neighbor import HERE, HOME, asks
from shoal.model.policy import Others, Policy
from shoal.model.reason import OPERATOR, Reader, Shown, render
from shoal.model.service import Service

SOMEBODY = "a user"  # the operator, in reasons that everybody may read


class Reach:
    """`record`: of a job that has ended, as it was read for this request."""

    def __init__(self, loop: ControlLoop, who: Principal, record: Job | None = None) -> None:
        self.loop = loop
        self.who = who
        self._record = record

    # -- what the sender may see ---------------------------------------------------------------

    def sees(self, job: Job) -> bool:
        return self.who.sees_job(job.spec.tenant, job.id)

    def find(self, job_id: str) -> Job | None:
        """The job, whether live, just ending or long finished."""
        job = self.loop.state.live(job_id) or self._ended(job_id)
        return job if job is not None and self.sees(job) else None

    def _ended(self, job_id: str) -> Job | None:
        """What was read is used once: whoever looks again wants to know what has changed."""
        record, self._record = self._record, None
        if record is not None and record.id == job_id:
            return record
        return self.loop.store.job(job_id)

    def job(self, job_id: str) -> Job:
        job = self.find(job_id)
        if job is None and self.loop.state.pending(job_id) and self.find(array_of(job_id)):
            raise Refusal(404, f"{job_id} has not begun; see: shoal why {array_of(job_id)}", "job")
        if job is None:
            raise Refusal(404, f"there is no job {job_id[:64]!r}; see: shoal ps -a", "job")
        return job

    def arrays(self) -> list[Job]:
        """The live ones."""
        return [array for array in self.loop.state.arrays.values() if self.sees(array)]

    def jobs(self) -> Iterable[Job]:
        """The live ones, also elements of arrays."""
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

    def policy(self, policy: Policy | None = None) -> Policy:
        """The one in force, or this one, without supplies, without tenants that are neither the
        sender's nor above it, and without neighbors that are for others."""
        policy = policy or self.loop.policy
        if self.who.sees_all:
            return policy
        own = {tenant.name for tenant in policy.lineage(self.who.tenant)}
        tenants = tuple(tenant for tenant in policy.tenants if tenant.name in own)
        theirs = tuple(
            msgspec.structs.replace(one, tenants=one.tenants and (self.who.tenant,))
            for one in policy.neighbors
            if not one.tenants or self.who.tenant in one.tenants
        )
        return msgspec.structs.replace(policy, tenants=tenants, supply=(), neighbors=theirs)

    # -- reasons -------------------------------------------------------------------------------

    @cached_property
    def reader(self) -> Reader:
        """Of reasons: only the policy may let the tenants of others' jobs be named."""
        if self.who.sees_all:
            return OPERATOR
        who, policy = self.who, self.loop.policy
        return Reader(
            tenant=who.tenant,
            first_job=who.first_job,
            above=tuple(tenant.name for tenant in policy.lineage(who.tenant)),
            tenants=policy.others is Others.TENANTS,
            knows=lambda job_id: self.find(job_id) is not None,
        )

    def text(self, reason: str) -> Shown:
        return render(reason, self.reader)

    def holders(self, job: Job) -> str:
        return holders_text(self.loop.state, job, self.sees, self.loop.policy.others)

    def guests(self) -> set[str]:
        """Tenants of clusters that may send jobs."""
        tokens = self.loop.state.identity.tokens.values()
        return {one.tenant for one in tokens if one.only and self.who.sees(one.tenant)}

    def waits(self) -> list[str]:
        loop, who = self.loop, self.who
        own = "" if who.sees_all else who.tenant
        now_ms = loop.clock.now_ms()
        return [self.text(line) for line in waits_of(loop.state, loop.policy, now_ms, own)]

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
        if who.only:  # one hop: it does not go on from here
            if asks(spec.cluster):
                raise Refusal(422, "is not for jobs of neighbors, which run here", "cluster")
            labels = {HOME: who.user, **spec.labels}
            spec = msgspec.structs.replace(spec, cluster=HERE, labels=labels)
        if who.admin:
            user = spec.user or (who.user if who.token else "")
            return msgspec.structs.replace(spec, tenant=tenant, user=user)
        if tenant != own:
            message = f"your token is for the tenant {own}; leave the field out, or ask an admin"
            raise Refusal(403, message, "tenant")
        return msgspec.structs.replace(spec, tenant=own, user=who.user)


def scoped_key(reach: Reach, spec: JobSpec, key: str) -> str:
    """Submission keys are each tenant's own: nobody learns of, or gets, a job by its key."""
    if not key or spec.tenant == DEFAULT_TENANT:
        return key
    return f"{reach.loop.state.identity.key(spec.tenant)}/{key}"


RECORD = "shoal.record"  # in a request's scope


def read_ahead(loop: ControlLoop, connection: Connection) -> Awaitable[None] | None:
    """Reads the job in the path in a thread, unless it is live. One that is about to end is not in
    the store yet: then the handler looks again."""
    job_id = connection.path_params.get("job_id", "")
    if not job_id or loop.tick.state.live(job_id) is not None:
        return None

    async def read() -> None:
        connection.scope[RECORD] = await aside(lambda: loop.store.job(job_id))

    return read()


# Events as their reader may see them: each event declares who that is.


def seen_events(
    reach: Reach, records: list[Recorded], owners: dict[str, str] | None = None
) -> list[Recorded]:
    """Without what the sender may not see, and with reasons as they read them. `owners`: tenants of
    jobs, as far as they were looked up before."""
    reader = _Sender(reach, owners or {})
    shown = ((record.seq, record.event.shown_to(reader)) for record in records)
    return [Recorded(seq, event) for seq, event in shown if event is not None]


class _Sender:
    """The sender of a request, as a reader of events."""

    def __init__(self, reach: Reach, owners: dict[str, str]) -> None:
        self._reach, self._owners = reach, owners
        self.admin, self.sees_all = reach.who.admin, reach.who.sees_all
        self.text = reach.text

    def sees_job(self, job: str) -> bool:
        if self.sees_all:
            return True
        tenant = self._owners.get(job)
        if tenant:
            return self._reach.who.sees_job(tenant, job)
        return self._reach.find(job) is not None

    def sees_tenant(self, tenant: str, at_ms: int) -> bool:
        who = self._reach.who
        return self.sees_all or (who.sees(tenant) and at_ms >= who.since_ms)

    def sees_service(self, service: str, at_ms: int) -> bool:
        """The name may have been another tenant's before."""
        if self.sees_all:  # then the state is not read: this may run in a thread
            return True
        known = self._reach.loop.state.services.get(service)
        return (
            known is not None
            and self._reach.who.sees(known.spec.replica.tenant)
            and at_ms >= known.since_ms
        )

    def policy(self, policy: Policy) -> Policy:
        return self._reach.policy(policy)
