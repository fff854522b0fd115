"""Curves as the API returns them: columns of equal length, oldest first; None: not known."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.node import GPUS_PER_NODE_MAX


class JobPoint(msgspec.Struct, kw_only=True):
    at_ms: int
    step: int
    loss: float | None
    step_ms: float | None  # time per step since the previous point


class MetricSeries(msgspec.Struct, kw_only=True):
    """`steps`: how far the job was; between two points of the job's own curve, in proportion."""

    name: str
    at_ms: list[int]
    values: list[float | None]
    steps: list[int] = []


class MemberSeries(msgspec.Struct, kw_only=True):
    """Where one member's time went. Shares are of its step time; the rest is its own work. All
    members of an attempt have the same `at_ms`."""

    attempt: int
    member: int
    node: str
    at_ms: list[int]
    step_ms: list[float | None]
    wait_share: list[float | None]  # waiting for its peers
    data_share: list[float | None]  # waiting for its next batch
    save_share: list[float | None]  # blocked by checkpoints


class JobSeries(msgspec.Struct, kw_only=True):
    """`width_ms` is the time between points; it doubles as the job gets older."""

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
    """The newest points are 2 s apart, older ones further."""

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
    response_ms: list[float | None] = []  # mean time until an answer began
    p50_ms: list[float | None] = []
    p95_ms: list[float | None] = []
    p99_ms: list[float | None] = []
    in_flight: list[float | None] = []
    queued: list[float | None] = []
    ready: list[float | None] = []  # replicas that are ready
    wanted: list[float | None] = []
    # Of a service of a language model; empty for others.
    ttft_p50_ms: list[float | None] = []  # until the first token
    ttft_p99_ms: list[float | None] = []
    itl_p50_ms: list[float | None] = []  # between two tokens
    itl_p99_ms: list[float | None] = []
    prompt_per_s: list[float | None] = []  # tokens
    generated_per_s: list[float | None] = []
    cached: list[float | None] = []  # 0 to 1, of the tokens of prompts
    good: list[float | None] = []  # 0 to 1, of the requests with a goal


# Samples of a node's load, sent from time to time; they may be lost and are never events.


Milli = Annotated[int, msgspec.Meta(ge=0, le=1000)]
Small = Annotated[int, msgspec.Meta(ge=0, le=65_000)]


class GpuSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU as its driver reports it. None: not reported."""

    busy_milli: Milli | None = None  # share of the time since the last sample that it was in use
    memory_milli: Milli | None = None  # share of its memory in use
    power_w: Small | None = None
    temperature_c: Small | None = None


READINGS_MAX, READING_AGE_MS_MAX = 16, 600_000


class EnergyReading(msgspec.Struct, frozen=True, array_like=True):
    """The energy counters of all GPUs, in mJ, as they were `age_ms` before they were sent."""

    age_ms: Annotated[int, msgspec.Meta(ge=0, le=READING_AGE_MS_MAX)]
    mj: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 62)], ...],
        msgspec.Meta(max_length=GPUS_PER_NODE_MAX),
    ]


class NodeSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine's load. `at_ms` is the node's own clock: it only distinguishes samples."""

    at_ms: int
    cpu_milli: Milli | None = None  # busy share of all its cores
    memory_milli: Milli | None = None
    gpus: Annotated[tuple[GpuSample, ...], msgspec.Meta(max_length=GPUS_PER_NODE_MAX)] = ()
    energy: Annotated[tuple[EnergyReading, ...], msgspec.Meta(max_length=READINGS_MAX)] = ()
