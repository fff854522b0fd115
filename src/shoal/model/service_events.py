"""What can happen to services."""

from __future__ import annotations

from typing import Self

import msgspec

from shoal.model.eventbase import EventBase, Reader
from shoal.model.hidden import service_without_keys
from shoal.model.phrases import because
from shoal.model.resources import plural
from shoal.model.service import ServiceSpec


class ServiceEvent(EventBase, frozen=True, kw_only=True):
    service: str
    why: str = ""

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

    def phrase(self) -> str:
        verb = "goes back to" if self.back else "starts"
        return f"{verb} version {self.version}{because(self.why)}"

    def visible_to(self, reader: Reader) -> bool:
        """Also after the service is gone."""
        return reader.sees_tenant(self.spec.replica.tenant, self.at_ms)

    def without_secrets(self) -> Self:
        return msgspec.structs.replace(self, spec=service_without_keys(self.spec))


class ServiceScaled(ServiceEvent, frozen=True, kw_only=True):
    wanted: int

    def phrase(self) -> str:
        return f"needs {plural(self.wanted, 'replica')}{because(self.why)}"


class ReplicaReady(ServiceEvent, frozen=True, kw_only=True):
    """The replica's probe was answered: it gets requests from now on."""

    job: str

    def phrase(self) -> str:
        return f"has replica {self.job} ready{because(self.why)}"

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_job(self.job)


class ReplicaDraining(ServiceEvent, frozen=True, kw_only=True):
    """The replica gets no new requests, and ends when it has answered those it has."""

    job: str

    def phrase(self) -> str:
        return f"is draining replica {self.job}{because(self.why)}"

    def visible_to(self, reader: Reader) -> bool:
        return reader.sees_job(self.job)


class ServiceStopping(ServiceEvent, frozen=True, kw_only=True):
    def phrase(self) -> str:
        return f"is being stopped{because(self.why)}"


class ServiceStopped(ServiceEvent, frozen=True, kw_only=True):
    """No replica is left, and the service is no longer in the state."""

    def phrase(self) -> str:
        return f"stopped{because(self.why)}"
