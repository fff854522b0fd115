"""Metrics for Prometheus at /metrics: the control plane, nodes, GPUs, jobs and services.

Labels are few and bounded: tenants (100, the others as one), nodes, GPUs, services, and the 200
largest jobs that train. docs/monitoring.md lists them all.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from shoal import __version__
from shoal.api.handling import handles
from shoal.api.http import Response
from shoal.api.views import DRAINED, gpu_counts, known_nodes, node_state, progress_view, sleepers_of
from shoal.calls.page import MachineCalls
from shoal.control.counters import OTHERS, TENANTS_MAX, Histogram
from shoal.control.history.history import History
from shoal.control.loop import ControlLoop
from shoal.core.state.state import Node
from shoal.model.bound import parts_of
from shoal.model.job import Job, Phase
from shoal.model.node import NodeHealth
from shoal.model.series import GpuSample, NodeSample
from shoal.model.service import Service, ServiceLoad
from shoal.model.tokens import TokenLoad
from shoal.model.views import ProgressView

# Metrics in the text format of Prometheus, version 0.0.4.
#
# Written by hand because it is one page of code, and because with 16,000 GPUs the client library
# takes half a second of the controller's time and this takes a tenth of that (bench/observe.py).


PIECE = 4000  # samples written before other work gets a turn
CONTENT_TYPE = "text/plain; version=0.0.4"  # the server adds the charset

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


def family(
    name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float | None]]
) -> str:
    """One metric with all its samples; nothing if there are none."""
    lines = [f"{name}{labels(own)} {number(value)}" for own, value in samples if value is not None]
    return _headed(name, kind, text, lines)


def large_family(
    name: str, kind: str, text: str, marks: Sequence[str], values: Sequence[float | None]
) -> Iterator[str]:
    """The same in pieces, with labels that are already text: for a metric of thousands of samples,
    which would otherwise block the controller."""
    begun = False
    for start in range(0, len(marks), PIECE):
        lines = [
            f"{name}{mark} {number(value)}"
            for mark, value in zip(
                marks[start : start + PIECE], values[start : start + PIECE], strict=True
            )
            if value is not None
        ]
        if lines:
            yield "\n".join(lines) + "\n" if begun else _headed(name, kind, text, lines)
            begun = True


def simple(name: str, kind: str, text: str, value: float | None) -> str:
    return family(name, kind, text, [({}, value)])


def histogram(name: str, text: str, seen: Histogram) -> str:
    lines, total = [], 0
    for bound, count in zip((*seen.bounds, None), seen.counts, strict=True):
        total += count
        edge = "+Inf" if bound is None else number(bound)
        lines.append(f'{name}_bucket{{le="{edge}"}} {total}')
    lines += [f"{name}_sum {number(seen.sum)}", f"{name}_count {total}"]
    return _headed(name, "histogram", text, lines)


def labels(own: Mapping[str, str]) -> str:
    if not own:
        return ""
    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in own.items()) + "}"


def escaped(value: str) -> str:
    return value if value.isalnum() else value.translate(_ESCAPES)


def number(value: float) -> str:
    if type(value) is int:
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(float(value))


def _headed(name: str, kind: str, text: str, lines: list[str]) -> str:
    if not lines:
        return ""
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n" + "\n".join(lines) + "\n"


JOBS_TOLD_MAX = 200
NODE_STATES = (
    "ready",
    "joining",
    "silent",
    "lost",
    "cordoned",
    "draining",
    DRAINED,
    "quarantined",
)


@handles(MachineCalls.metrics, media_type=CONTENT_TYPE)
async def metrics(loop: ControlLoop, history: History) -> Response[bytes]:
    """For Prometheus, which sends the token from its `authorization: credentials_file`."""
    parts: list[str] = []
    while True:
        parts, state = [], loop.state
        for part in collect(loop, history):
            parts.append(part)
            await asyncio.sleep(0)  # a large cluster's answer is long: give other work a turn
            await loop.settled()
            if loop.state is not state:
                break  # the state was reloaded: what was collected may not be stored
        else:
            return Response("".join(parts).encode(), media_type=CONTENT_TYPE)


def collect(loop: ControlLoop, history: History) -> Iterator[str]:
    yield from _controller(loop, history)
    yield from _nodes(loop, history)
    yield from _jobs(loop)
    yield from _services(loop)


def _controller(loop: ControlLoop, history: History) -> Iterator[str]:
    counters, started = loop.counters, loop.started_ms / 1000
    yield family(
        "shoal_build_info", "gauge", "The running version.", [({"version": __version__}, 1)]
    )
    yield simple("shoal_controller_start_time_seconds", "gauge", "Time of its start.", started)
    yield simple("shoal_controller_starts_total", "counter", "Controller starts.", loop.state.epoch)
    yield histogram("shoal_step_duration_seconds", "Time of one scheduling step.", counters.steps)
    yield histogram("shoal_commit_duration_seconds", "Time to store a step.", counters.commits)
    yield histogram(
        "shoal_job_wait_seconds", "From submission to the first placement.", counters.waits
    )
    yield simple("shoal_node_reports_total", "counter", "Inventories heard.", counters.reports)
    yield family(
        "shoal_events_total",
        "counter",
        "Events stored.",
        [({"event": kind}, count) for kind, count in sorted(counters.events.items())],
    )
    yield family(
        "shoal_job_placements_total",
        "counter",
        "Attempts that were placed.",
        [({"tenant": tenant}, count) for tenant, count in sorted(counters.placements.items())],
    )
    yield family(
        "shoal_job_stops_total",
        "counter",
        "Attempts that were stopped, by cause.",
        [({"cause": cause}, count) for cause, count in sorted(counters.stops.items())],
    )
    yield family(
        "shoal_jobs_finished_total",
        "counter",
        "Jobs that ended.",
        [({"outcome": o, "tenant": t}, count) for (o, t), count in sorted(counters.ends.items())],
    )
    yield simple("shoal_requests_waiting", "gauge", "Requests not yet handled.", loop.tick.waiting)
    yield simple(
        "shoal_history_size_bytes", "gauge", "Samples that are kept.", history.file.size_bytes
    )
    yield from _process()


def _process() -> Iterator[str]:
    times = os.times()
    yield simple(
        "process_cpu_seconds_total", "counter", "CPU of the controller.", times.user + times.system
    )
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return
    resident = pages * os.sysconf("SC_PAGE_SIZE")
    yield simple("process_resident_memory_bytes", "gauge", "Memory of the controller.", resident)


def _nodes(loop: ControlLoop, history: History) -> Iterator[str]:
    nodes = known_nodes(loop)
    counts = dict.fromkeys(NODE_STATES, 0)
    for node in nodes:
        word = node_state(loop, node)
        counts[word] = counts.get(word, 0) + 1
    yield family(
        "shoal_nodes", "gauge", "Nodes by state.", [({"state": s}, n) for s, n in counts.items()]
    )
    yield family(
        "shoal_node_up",
        "gauge",
        "Whether the node answers.",
        [({"node": node.id}, node.health is NodeHealth.READY) for node in nodes],
    )
    yield family(
        "shoal_gpus",
        "gauge",
        "GPUs by state: held by jobs, free, or unusable because of their node.",
        [({"state": state}, count) for state, count in gpu_counts(loop).items()],
    )
    if loop.state.napping:
        yield from _sleepers(loop, nodes)
    samples = [
        (node, history.newest[node.id])
        for node in nodes
        if node.health is NodeHealth.READY and node.id in history.newest
    ]
    marks = [labels({"node": node.id}) for node, _ in samples]
    for name, text, read in NODE_RATIOS:
        yield from large_family(name, "gauge", text, marks, [read(one) for _, one in samples])
    gpus = [one for _, sample in samples for one in sample.gpus]
    yield ""  # give other work a turn
    marks = [
        f'{{node="{escaped(node.id)}",gpu="{gpu}"}}'
        for node, sample in samples
        for gpu in range(len(sample.gpus))
    ]
    for name, text, tell in GPU_VALUES:
        yield from large_family(name, "gauge", text, marks, [tell(one) for one in gpus])


def _sleepers(loop: ControlLoop, nodes: list[Node]) -> Iterator[str]:
    """Only nodes where members sleep: most have none."""
    found = [(node.id, told) for node in nodes if (told := sleepers_of(loop, node)).members]
    yield family(
        "shoal_node_sleepers",
        "gauge",
        "Members that sleep there, or are on the way there or back.",
        [({"node": node}, told.members) for node, told in found],
    )
    yield family(
        "shoal_node_sleepers_memory_bytes",
        "gauge",
        "Memory that is set aside for what they had on GPUs.",
        [({"node": node}, told.host_mb * 2**20) for node, told in found],
    )


def _ratio(milli: int | None) -> float | None:
    return None if milli is None else milli / 1000


NODE_RATIOS: tuple[tuple[str, str, Callable[[NodeSample], float | None]], ...] = (
    ("shoal_node_cpu_busy_ratio", "Busy share of its cores.", lambda s: _ratio(s.cpu_milli)),
    ("shoal_node_memory_used_ratio", "Used share of its memory.", lambda s: _ratio(s.memory_milli)),
)
GPU_VALUES: tuple[tuple[str, str, Callable[[GpuSample], float | None]], ...] = (
    ("shoal_gpu_busy_ratio", "Share of the time in use.", lambda g: _ratio(g.busy_milli)),
    ("shoal_gpu_memory_used_ratio", "Used share of its memory.", lambda g: _ratio(g.memory_milli)),
    ("shoal_gpu_power_watts", "Drawn now.", lambda g: g.power_w),
    ("shoal_gpu_temperature_celsius", "Temperature of the chip.", lambda g: g.temperature_c),
)


def _jobs(loop: ControlLoop) -> Iterator[str]:
    counts: dict[tuple[str, str], int] = {}
    tenants: dict[str, None] = {}
    for job in loop.state.jobs.values():
        tenant = job.spec.tenant
        if tenant not in tenants:
            if len(tenants) >= TENANTS_MAX:
                tenant = OTHERS
            tenants[tenant] = None
        key = job.phase.value, tenant
        counts[key] = counts.get(key, 0) + 1
    yield family(
        "shoal_jobs",
        "gauge",
        "Live jobs by phase.",
        [({"state": state, "tenant": t}, n) for (state, t), n in sorted(counts.items())],
    )
    training = [(job, view) for job in _largest(loop) if (view := progress_view(loop, job))]
    for name, text, read in JOB_VALUES:
        yield family(
            name,
            "gauge",
            text,
            [
                # Prometheus uses the label `job` for its own scrape configuration.
                ({"job_id": job.id, "tenant": job.spec.tenant}, read(view))
                for job, view in training
            ],
        )
    yield family(
        "shoal_job_step_share",
        "gauge",
        "Share of a step by what it is spent on; together 1.",
        [
            ({"job_id": job.id, "tenant": job.spec.tenant, "part": part}, milli / 1000)
            for job, view in training
            if view.bound is not None
            for part, milli in parts_of(view.bound.shares)
        ],
    )


def _largest(loop: ControlLoop) -> list[Job]:
    state = loop.state
    found = [job for one in state.heard.watches if (job := state.jobs[one]).phase is Phase.RUNNING]
    found.sort(key=lambda job: (-job.spec.gpus * len(job.members), job.number))
    return found[:JOBS_TOLD_MAX]


JOB_VALUES: tuple[tuple[str, str, Callable[[ProgressView], float | None]], ...] = (
    ("shoal_job_step", "The current step.", lambda v: v.step),
    ("shoal_job_saved_step", "The step after its newest checkpoint.", lambda v: v.saved_step),
    ("shoal_job_step_duration_seconds", "Usual time of a step.", lambda v: v.step_us / 1e6 or None),
    ("shoal_job_loss", "The loss it reports.", lambda v: v.loss),
    ("shoal_job_slow_members", "Members that hold the others up.", lambda v: len(v.slow)),
)


def _services(loop: ControlLoop) -> Iterator[str]:
    state = loop.state
    known = [(name, one, state.heard.loads.get(name)) for name, one in state.services.items()]
    told = [(name, load) for name, _, load in known if load is not None and load.tells]
    yield family(
        "shoal_service_up",
        "gauge",
        "Whether the gateway serves it.",
        [({"service": name}, load is not None and load.tells) for name, _, load in known],
    )
    for name, text, read in SERVICE_LOADS:
        yield family(name, "gauge", text, [({"service": one}, read(load)) for one, load in told])
    yield family(
        "shoal_service_response_seconds",
        "gauge",
        "Time until an answer began, over the last 15 seconds.",
        [
            ({"service": name, "percentile": share}, value / 1000)
            for name, load in told
            if load.answers_per_ks
            for share, value in (("50", load.p50_ms), ("95", load.p95_ms), ("99", load.p99_ms))
        ],
    )
    routed = [(name, load.tokens) for name, load in told if load.tokens is not None]
    for name, kind, text, of in TOKEN_VALUES if routed else ():
        yield family(name, kind, text, [({"service": one}, of(seen)) for one, seen in routed])
    for name, text, both in TOKEN_TIMES if routed else ():
        yield family(
            name,
            "gauge",
            text,
            [
                ({"service": one, "percentile": share}, value / 1000)
                for one, seen in routed
                for share, value in zip(("50", "99"), both(seen), strict=True)
            ],
        )
    for name, text, count in SERVICE_COUNTS:
        yield family(
            name, "gauge", text, [({"service": one}, count(service)) for one, service, _ in known]
        )


SERVICE_LOADS: tuple[tuple[str, str, Callable[[ServiceLoad], float]], ...] = (
    ("shoal_service_request_rate", "Answers per second.", lambda s: s.answers_per_ks / 1000),
    (
        "shoal_service_failure_rate",
        "Answers of 500 and above, and connections refused or broken off, per second.",
        lambda s: s.failures_per_ks / 1000,
    ),
    ("shoal_service_in_flight_requests", "At replicas.", lambda s: s.in_flight),
    ("shoal_service_queued_requests", "Queued in the gateway.", lambda s: s.queued + s.held),
)
TOKEN_VALUES: tuple[tuple[str, str, str, Callable[[TokenLoad], float | None]], ...] = (
    ("shoal_tokens_prompt_rate", "gauge", "Per second, cached or not.", lambda t: t.prompt_per_s),
    ("shoal_tokens_generated_rate", "gauge", "Per second.", lambda t: t.generated_per_s),
    (
        "shoal_tokens_cached_ratio",
        "gauge",
        "Share of the tokens of prompts that a replica had cached.",
        lambda t: t.hit_milli / 1000,
    ),
    (
        "shoal_tokens_goodput_ratio",
        "gauge",
        "Share of the requests that met the goals, over the last 15 seconds.",
        lambda t: t.good / t.judged if t.judged else None,
    ),
    ("shoal_tokens_queued_requests", "gauge", "Queued in the router.", lambda t: t.queued),
    ("shoal_tokens_refused_total", "counter", "Answered with 429.", lambda t: t.refused),
    ("shoal_tokens_resumed_total", "counter", "Streams continued elsewhere.", lambda t: t.resumed),
    ("shoal_tokens_broken_total", "counter", "Streams that could not be.", lambda t: t.broken),
)
TOKEN_TIMES: tuple[tuple[str, str, Callable[[TokenLoad], tuple[int, int]]], ...] = (
    (
        "shoal_tokens_first_seconds",
        "Time to the first token, over the last 15 seconds.",
        lambda t: (t.ttft_p50_ms, t.ttft_p99_ms),
    ),
    (
        "shoal_tokens_between_seconds",
        "Mean time between two tokens of an answer, over the last 15 seconds.",
        lambda t: (t.itl_p50_ms, t.itl_p99_ms),
    ),
)
SERVICE_COUNTS: tuple[tuple[str, str, Callable[[Service], float]], ...] = (
    (
        "shoal_service_replicas_ready",
        "Replicas that get requests.",
        lambda s: len(s.ready) - len(s.draining),
    ),
    ("shoal_service_replicas_wanted", "Replicas wanted.", lambda s: s.wanted),
)
