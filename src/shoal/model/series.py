"""Curves as the API tells them: columns of equal length, oldest first; None: not known then."""

from __future__ import annotations

import msgspec


class JobPoint(msgspec.Struct, kw_only=True):
    at_ms: int
    step: int
    loss: float | None
    step_ms: float | None  # what a step took since the point before


class MetricSeries(msgspec.Struct, kw_only=True):
    name: str
    at_ms: list[int]
    values: list[float | None]


class MemberSeries(msgspec.Struct, kw_only=True):
    """Where one member's time went. Shares are of its step time; what is left is its own work. All
    members of an attempt have the same `at_ms`."""

    attempt: int
    member: int
    node: str
    at_ms: list[int]
    step_ms: list[float | None]
    wait_share: list[float | None]  # for its peers
    data_share: list[float | None]  # for its next batch
    save_share: list[float | None]  # for checkpoints


class JobSeries(msgspec.Struct, kw_only=True):
    """`width_ms` is how far apart points are: it doubles as the job gets older."""

    id: str
    width_ms: int
    points: list[JobPoint] = []
    metrics: list[MetricSeries] = []
    members: list[MemberSeries] = []


class GpuSeries(msgspec.Struct, kw_only=True):
    gpu: int
    busy: list[float | None]  # 0 to 1
    memory: list[float | None]  # 0 to 1
    power_w: list[float | None]
    temperature_c: list[float | None]


class NodeSeries(msgspec.Struct, kw_only=True):
    """The newest points are 2 s apart, and the older the further."""

    id: str
    at_ms: list[int] = []
    cpu: list[float | None] = []  # 0 to 1
    memory: list[float | None] = []  # 0 to 1
    gpus: list[GpuSeries] = []


class ServiceSeries(msgspec.Struct, kw_only=True):
    name: str
    at_ms: list[int] = []
    requests_per_s: list[float | None] = []
    failed_per_s: list[float | None] = []
    response_ms: list[float | None] = []  # until an answer began, the mean
    p50_ms: list[float | None] = []
    p95_ms: list[float | None] = []
    p99_ms: list[float | None] = []
    in_flight: list[float | None] = []
    queued: list[float | None] = []
    ready: list[float | None] = []  # replicas
    wanted: list[float | None] = []
