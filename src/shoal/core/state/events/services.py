"""What happens to services."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import msgspec

from shoal.core.state.events.base import EventBase, Reader
from shoal.core.state.state import State
from shoal.model.far import Far
from shoal.model.hidden import service_without_keys
from shoal.model.phrases import because
from shoal.model.resources import plural
from shoal.model.service import VERSIONS_KEPT, Past, Service, ServiceSpec
from shoal.model.sites import Site


class ServiceEvent(EventBase, frozen=True, kw_only=True):
    service: str
    why: str = ""

    def services(self, state: State) -> Iterable[str]:  # noqa: ARG002
        return (self.service,)

    @property
    def subject(self) -> str:
        return f"service {self.service}"

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_service(self.service, self.at_ms)


class ServiceSet(ServiceEvent, frozen=True, kw_only=True):
    """The service's spec from now on; `back`: a return to the spec before."""

    spec: ServiceSpec
    version: int
    back: bool = False

    def apply(self, state: State) -> None:
        service = state.services.get(self.service)
        known = service is not None
        if service is None:
            service = Service(spec=self.spec, since_ms=self.at_ms, wanted=self.spec.scale.least)
            service.set_ms, service.set_why = self.at_ms, self.why
            state.services[self.service] = service
        elif self.back:
            service.before, service.proven = None, True
            gone = (one for one in service.past if one.version == self.version)
            if (kept := next(gone, None)) is not None:
                service.past.remove(kept)
                service.set_ms, service.set_why = kept.at_ms, kept.why
        elif service.proven and self.version != service.version:
            service.before, service.before_version = service.spec, service.version
            service.past = [*service.past, _past(service)][-VERSIONS_KEPT:]
            service.proven = False
        if known and self.version != service.version and not self.back:
            service.set_ms, service.set_why = self.at_ms, self.why
        if known:
            state.tally.service(state.accounts, service.spec, -1)
            state.sizes.service(service.spec, gone=True)
        state.tally.service(state.accounts, self.spec, 1)
        state.sizes.service(self.spec)
        service.spec, service.version, service.why = self.spec, self.version, self.why
        service.newest = max(service.newest, self.version)
        service.failures, service.retry_ms = 0, 0
        if state.endings:
            state.agenda.other_gaps()  # its replicas may need more or less time to leave a node
            state.agenda.ends_ms = 0
        scale = self.spec.scale
        service.wanted = min(max(service.wanted, scale.least), scale.most)

    def phrase(self) -> str:
        verb = "rolls back to" if self.back else "starts"
        return f"{verb} version {self.version}{because(self.why)}"

    def visible_to(self, reader: Reader) -> bool:
        """Also after the service is gone."""
        return reader.sees_tenant(self.spec.replica.tenant, self.at_ms)

    def without_secrets(self) -> Self:
        return msgspec.structs.replace(self, spec=service_without_keys(self.spec))


def _past(service: Service) -> Past:
    return Past(
        version=service.version, spec=service.spec, at_ms=service.set_ms, why=service.set_why
    )


class ServiceScaled(ServiceEvent, frozen=True, kw_only=True):
    wanted: int

    def apply(self, state: State) -> None:
        service = state.services[self.service]
        service.wanted, service.why = self.wanted, self.why

    def phrase(self) -> str:
        return f"needs {plural(self.wanted, 'replica')}{because(self.why)}"


class ReplicaReady(ServiceEvent, frozen=True, kw_only=True):
    """The replica's probe was answered: it gets requests from now on. `got_ms`: how long its nodes
    took to get what it needs, by kind; `listened_ms`: when it first listened on its port. None: it
    was not heard."""

    job: str
    got_ms: dict[str, int] | None = None
    listened_ms: int | None = None

    def apply(self, state: State) -> None:
        service = state.services[self.service]
        service.ready[self.job] = self.at_ms
        if state.jobs[self.job].spec.version == service.version:
            service.proven, service.failures = True, 0
            service.why = f"{self.job}: {self.why}"

    def phrase(self) -> str:
        return f"has replica {self.job} ready{because(self.why)}"

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_job(self.job)


class ReplicaDraining(ServiceEvent, frozen=True, kw_only=True):
    """The replica gets no new requests, and ends when it has answered those it has."""

    job: str

    def apply(self, state: State) -> None:
        state.services[self.service].draining[self.job] = self.at_ms

    def phrase(self) -> str:
        return f"is draining replica {self.job}{because(self.why)}"

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_job(self.job)


class ServiceStopping(ServiceEvent, frozen=True, kw_only=True):
    def apply(self, state: State) -> None:
        service = state.services[self.service]
        service.stopping, service.wanted, service.why = True, 0, self.why

    def phrase(self) -> str:
        return f"is being stopped{because(self.why)}"


class ServiceStopped(ServiceEvent, frozen=True, kw_only=True):
    """No replica is left, and the service is no longer in the state."""

    def apply(self, state: State) -> None:
        service = state.services.pop(self.service)
        state.tally.service(state.accounts, service.spec, -1)
        state.sizes.service(service.spec, gone=True)
        state.heard.loads.pop(self.service, None)
        state.heard.recent_work.pop(self.service, None)

    def phrase(self) -> str:
        return f"stopped{because(self.why)}"


class SiteEvent(ServiceEvent, frozen=True, kw_only=True):
    """Something about a service at a neighbor."""

    site: str


class SiteAsked(SiteEvent, frozen=True, kw_only=True):
    """The neighbor is sent this version from now on."""

    version: int

    def apply(self, state: State) -> None:
        sites = state.services[self.service].sites
        known = sites.get(self.site) or Site(version=0, asked_ms=0)
        sites[self.site] = msgspec.structs.replace(
            known, version=self.version, asked_ms=self.at_ms, said=0
        )

    def phrase(self) -> str:
        return f"goes to {self.site} in version {self.version}{because(self.why)}"


class SiteHeard(SiteEvent, frozen=True, kw_only=True):
    """What the neighbor has: as `Site`."""

    has: int
    ready: int
    door: Far | None = None

    def apply(self, state: State) -> None:
        sites = state.services[self.service].sites
        known = sites[self.site]
        sites[self.site] = msgspec.structs.replace(
            known,
            has=self.has,
            ready=self.ready,
            door=self.door,
            said=known.said + 1,
            said_ms=self.at_ms,
        )

    def phrase(self) -> str:
        if not self.has:
            return f"is not at {self.site}{because(self.why)}"
        what = "is ready" if self.ready == self.has else "is"
        return f"{what} at {self.site} in version {self.has}{because(self.why)}"


class SiteEnded(SiteEvent, frozen=True, kw_only=True):
    """The neighbor has none of it any more."""

    def apply(self, state: State) -> None:
        del state.services[self.service].sites[self.site]

    def phrase(self) -> str:
        return f"has ended at {self.site}{because(self.why)}"


class SitesTold(ServiceEvent, frozen=True, kw_only=True):
    """Of a service that a neighbor has here: where its other sites are."""

    doors: tuple[Far, ...]

    def apply(self, state: State) -> None:
        state.services[self.service].doors = self.doors

    def phrase(self) -> str:
        names = ", ".join(one.site for one in self.doors)
        return f"is called from {names}" if names else "is called from no other cluster"
