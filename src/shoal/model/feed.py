"""What the stream of changes sends of nodes, jobs and services: short, because it is frequent."""

from __future__ import annotations

import msgspec

from shoal.model.sites import SiteView
from shoal.model.views import JobBase, StatusView


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A member's part of a node: `milli` is the share of each of its GPUs."""

    job: str
    member: int
    gpus: tuple[int, ...]
    milli: int


class NodeLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    state: str
    place: str = ""
    gpus: int = 0
    model: str = ""
    held: tuple[Held, ...] = ()
    why: str = ""
    since_ms: int = 0
    standing: str = ""  # empty if it is ok
    ends_ms: int = 0  # until when it lives; 0: no end is known
    ends_why: str = ""
    labels: str = ""  # and taints, as in `shoal nodes --labels`; the first of them
    asleep: tuple[str, ...] = ()  # jobs with members that hold no GPU here because they sleep
    sleepers_mb: int = 0  # memory that is set aside for those that sleep, or are on the way
    no_sleep: str = ""  # why members cannot sleep on its GPUs


class JobLine(JobBase, frozen=True, kw_only=True, omit_defaults=True):
    """`heat`: how much of the time each member works, in per cent; -1 if it does not report."""

    array: str = ""  # it is an element of this one
    elements: int = 0  # of an array: how many, how many have ended, and the same in words
    done: int = 0
    counts: str = ""
    step: int = 0
    steps: int = 0
    step_us: int = 0
    moved_ms: int = 0  # the last sign of work, if the job reports steps
    loss: float | None = None
    heat: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()
    nap_ms: int = 0  # since when it has been falling asleep, asleep or waking
    wants: bool = False  # it is to wake as soon as there is room
    cluster: str = ""  # the neighbor that has it


class ReplicaLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    job: str
    state: str
    node: str = ""
    nodes: tuple[str, ...] = ()  # of the members of a gang
    version: int = 0
    in_flight: int = 0
    rps: float = 0
    response_ms: int = 0


class ServiceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    state: str
    tenant: str = ""
    version: int = 1
    before: int = 0  # the version that a roll-back goes to
    least: int = 0
    most: int = 0
    target: int = 0  # requests that keep one replica busy
    wanted: int = 0
    ready: int = 0
    in_flight: int = 0
    queued: int = 0
    rps: float = 0
    failed_per_s: float = 0
    response_ms: int = 0
    why: str = ""
    replicas: tuple[ReplicaLine, ...] = ()
    sites: tuple[SiteView, ...] = ()  # without their reasons: the first is in `why`


class Snapshot(msgspec.Struct, kw_only=True):
    status: StatusView
    nodes: list[NodeLine]
    jobs: list[JobLine]
    services: list[ServiceLine]
    ended: list[JobLine]
    busy: dict[str, tuple[int, ...]]  # per cent, of each GPU of nodes that measure it


class Change(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`ended`: jobs that have finished; `gone_*`: things that no longer exist."""

    status: StatusView | None = None
    nodes: list[NodeLine] = []
    jobs: list[JobLine] = []
    services: list[ServiceLine] = []
    ended: list[JobLine] = []
    gone_nodes: list[str] = []
    gone_jobs: list[str] = []
    gone_services: list[str] = []
    busy: dict[str, tuple[int, ...]] = {}
