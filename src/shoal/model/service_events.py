"""What can happen to services."""

from __future__ import annotations

from shoal.model.eventbase import EventBase
from shoal.model.service import ServiceSpec


class ServiceEvent(EventBase, frozen=True, kw_only=True):
    service: str
    why: str = ""


class ServiceSet(ServiceEvent, frozen=True, kw_only=True):
    """The service's spec from now on; `back`: a return to the spec before."""

    spec: ServiceSpec
    version: int
    back: bool = False


class ServiceScaled(ServiceEvent, frozen=True, kw_only=True):
    wanted: int


class ReplicaReady(ServiceEvent, frozen=True, kw_only=True):
    """The replica's probe was answered: it gets requests from now on."""

    job: str


class ReplicaDraining(ServiceEvent, frozen=True, kw_only=True):
    """The replica gets no new requests, and ends when it has answered those it has."""

    job: str


class ServiceStopping(ServiceEvent, frozen=True, kw_only=True):
    pass


class ServiceStopped(ServiceEvent, frozen=True, kw_only=True):
    """No replica is left, and the service is no longer in the state."""
