"""Samples of nodes and services as rows of a series, and back in the API's form."""

from __future__ import annotations

from functools import cache

import msgspec

from shoal.control.history.curve import Fading, Merge, Shape, Value, short
from shoal.model.series import GpuSeries, NodeSample, NodeSeries, ServiceSeries
from shoal.model.service import Service, ServiceLoad
from shoal.model.tokens import TokenLoad

NODE_FIELDS = 2
GPU_FIELDS = 4
SERVICE_MERGES = {
    "requests_per_s": Merge.MEAN,
    "failed_per_s": Merge.MEAN,
    "response_ms": Merge.MEAN,
    # Percentiles cannot be averaged: the worse of the two is what people look for.
    "p50_ms": Merge.MOST,
    "p95_ms": Merge.MOST,
    "p99_ms": Merge.MOST,
    "in_flight": Merge.MEAN,
    "queued": Merge.MOST,
    "ready": Merge.LAST,
    "wanted": Merge.LAST,
}


TOKEN_MERGES = {
    "ttft_p50_ms": Merge.MEAN,
    "ttft_p99_ms": Merge.MOST,
    "itl_p50_ms": Merge.MEAN,
    "itl_p99_ms": Merge.MOST,
    "prompt_per_s": Merge.MEAN,
    "generated_per_s": Merge.MEAN,
    "cached": Merge.MEAN,
    "good": Merge.MEAN,
}


class NodePoint(msgspec.Struct, frozen=True, tag="n", array_like=True):
    node: str
    at_ms: int
    gpus: int
    values: list[Value]


class ServicePoint(msgspec.Struct, frozen=True, tag="s", array_like=True):
    service: str
    at_ms: int
    values: list[Value]


@cache
def node_shape(gpus: int) -> Shape:
    of_gpu = (Merge.MEAN, Merge.MEAN, Merge.MEAN, Merge.MOST)
    return Shape((Merge.MEAN, Merge.MEAN, *(of_gpu * gpus)), "H")


@cache
def service_shape(tokens: bool = False) -> Shape:
    """`tokens`: of a service with a token router."""
    more = TOKEN_MERGES if tokens else {}
    return Shape((*SERVICE_MERGES.values(), *more.values()), "f")


def node_point(node: str, at_ms: int, sample: NodeSample) -> NodePoint:
    values: list[Value] = [sample.cpu_milli, sample.memory_milli]
    for gpu in sample.gpus:
        values += [gpu.busy_milli, gpu.memory_milli, gpu.power_w, gpu.temperature_c]
    return NodePoint(node, at_ms, len(sample.gpus), values)


def service_point(service: Service, load: ServiceLoad, at_ms: int) -> ServicePoint:
    asked = bool(load.answers_per_ks)
    values: dict[str, Value] = {
        "requests_per_s": load.answers_per_ks / 1000,
        "failed_per_s": load.failures_per_ks / 1000,
        "response_ms": load.response_ms if asked else None,
        "p50_ms": load.p50_ms if asked else None,
        "p95_ms": load.p95_ms if asked else None,
        "p99_ms": load.p99_ms if asked else None,
        "in_flight": load.in_flight,
        "queued": load.queued + load.held,
        "ready": len(service.ready) - len(service.draining),
        "wanted": service.wanted,
    }
    row = [values[name] for name in SERVICE_MERGES]
    return ServicePoint(service.spec.name, at_ms, row + token_values(load.tokens))


def token_values(seen: TokenLoad | None) -> list[Value]:
    if seen is None:
        return []
    values: dict[str, Value] = {
        "ttft_p50_ms": seen.ttft_p50_ms or None,
        "ttft_p99_ms": seen.ttft_p99_ms or None,
        "itl_p50_ms": seen.itl_p50_ms or None,
        "itl_p99_ms": seen.itl_p99_ms or None,
        "prompt_per_s": seen.prompt_per_s,
        "generated_per_s": seen.generated_per_s,
        "cached": seen.hit_milli / 1000 if seen.prompt_per_s else None,
        "good": seen.good / seen.judged if seen.judged else None,
    }
    return [values[name] for name in TOKEN_MERGES]


def node_series(node: str, known: Fading | None, since_ms: int) -> NodeSeries:
    if known is None:
        return NodeSeries(id=node)
    rows = [(at, values) for at, values in known.rows() if at > since_ms]
    gpus = (len(known.shape.merges) - NODE_FIELDS) // GPU_FIELDS

    def column(index: int, scale: float = 1000) -> list[float | None]:
        return [None if (v := values[index]) is None else v / scale for _, values in rows]

    return NodeSeries(
        id=node,
        at_ms=[at for at, _ in rows],
        cpu=column(0),
        memory=column(1),
        gpus=[
            GpuSeries(
                gpu=gpu,
                busy=column(first),
                memory=column(first + 1),
                power_w=column(first + 2, 1),
                temperature_c=column(first + 3, 1),
            )
            for gpu, first in enumerate(range(NODE_FIELDS, NODE_FIELDS + GPU_FIELDS * gpus, 4))
        ],
    )


def service_series(name: str, known: Fading | None, since_ms: int) -> ServiceSeries:
    if known is None:
        return ServiceSeries(name=name)
    rows = [(at, values) for at, values in known.rows() if at > since_ms]
    columns = {
        field: [short(values[index]) for _, values in rows]
        for index, field in enumerate((*SERVICE_MERGES, *TOKEN_MERGES))
        if index < len(known.shape.merges)
    }
    return ServiceSeries(name=name, at_ms=[at for at, _ in rows], **columns)
