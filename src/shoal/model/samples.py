"""Samples of a node's load, sent from time to time; they may be lost and are never events."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.model.node import GPUS_PER_NODE_MAX

Milli = Annotated[int, msgspec.Meta(ge=0, le=1000)]
Small = Annotated[int, msgspec.Meta(ge=0, le=65_000)]


class GpuSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One GPU as its driver reports it. None: not reported."""

    busy_milli: Milli | None = None  # share of the time since the last sample that it was in use
    memory_milli: Milli | None = None  # share of its memory in use
    power_w: Small | None = None
    temperature_c: Small | None = None


class NodeSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The machine's load. `at_ms` is the node's own clock: it only distinguishes samples."""

    at_ms: int
    cpu_milli: Milli | None = None  # busy share of all its cores
    memory_milli: Milli | None = None
    gpus: Annotated[tuple[GpuSample, ...], msgspec.Meta(max_length=GPUS_PER_NODE_MAX)] = ()
