"""A whole plan of a training run: layout, time, failures, money, and what they depend on."""

from __future__ import annotations

import msgspec

from shoal.plan import limits, money
from shoal.plan.failures import (
    PER_GPU_HOUR,
    RESTART_S,
    STORAGE_BYTES_PER_S_PER_NODE,
    Faults,
    Goodput,
    goodput,
)
from shoal.plan.hardware import Cluster
from shoal.plan.impossible import Impossible, at_most
from shoal.plan.layout import Layout, Stack, problem
from shoal.plan.memory import Memory, memory
from shoal.plan.model import Model
from shoal.plan.search import Family, search
from shoal.plan.step import Estimate, Parts

CHECKPOINT_BYTES = 14  # of a parameter: its weight in 16 bits, and Adam's states in 32
TOKENS_MAX = 1e18
BATCH_TOKENS = 4 * 2**20  # of a step, unless said otherwise
BATCH_TOKENS_LARGE, LARGE = 16 * 2**20, 100e9  # as Llama 3 405B was trained
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the nodes, for the curve
LAYOUTS = 5


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be planned. `batch` is in sequences."""

    model: Model
    cluster: Cluster
    tokens: float
    batch: int
    rates: money.Rates
    stack: Stack = Stack()
    fixed: dict[str, int | str | bool] = {}
    per_gpu_hour: float = PER_GPU_HOUR
    restart_s: float = RESTART_S
    storage_bytes_per_s: float = 0.0  # of the whole cluster; 0: the usual of a node

    def check(self) -> Ask:
        self.model.check()
        self.cluster.check()
        if not self.tokens > 0:
            raise Impossible(f"tokens is {self.tokens:g}: it must be more than 0")
        at_most("tokens", self.tokens, TOKENS_MAX)
        return self

    def on(self, nodes: int) -> Ask:
        return msgspec.structs.replace(
            self, cluster=msgspec.structs.replace(self.cluster, nodes=nodes)
        )


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster of one size."""

    nodes: int
    gpus: int
    time_s: float
    money: float | None
    mfu: float
    goodput: float
    layout: str


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of the fullest GPU if one kind of parallelism alone spreads the model."""

    name: str
    memory: Memory
    fits: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Times are in seconds, amounts in bytes."""

    model: str
    parameters: float
    active_parameters: float
    tokens: float
    gpu: str
    nodes: int
    gpus: int
    batch: int
    sequence: int
    layout: str
    best: Estimate
    parts: Parts
    memory_room: float
    time_s: float
    faults: Goodput
    cost: money.Cost
    network_bytes_per_s: float  # that a GPU sends to other nodes, on average
    bisection_bytes_per_s: float
    read_bytes_per_s: float
    layouts: list[Point]
    families: list[Family]
    kinds: list[Kind]
    limits: list[limits.Gain]
    sizes: list[Point]


def batch_for(model: Model) -> int:
    """The usual number of sequences in a step."""
    tokens = BATCH_TOKENS_LARGE if model.parameters() >= LARGE else BATCH_TOKENS
    return max(1, tokens // model.sequence)


def point(ask: Ask, estimate: Estimate | None = None) -> Point:
    """Only what a curve needs; Impossible if it cannot be."""
    found = estimate or best(ask)
    faults = _faults(ask)
    time_s = _time_s(ask, found, faults)
    return Point(
        nodes=ask.cluster.nodes,
        gpus=ask.cluster.gpus,
        time_s=time_s,
        money=money.cost(ask.cluster.gpus, time_s / 3600, ask.rates).money,
        mfu=found.mfu,
        goodput=faults.goodput,
        layout=found.layout.words(),
    )


def best(ask: Ask) -> Estimate:
    return search(ask.model, ask.cluster, ask.batch, ask.stack, keep=1, fixed=ask.fixed).best


def plan(ask: Ask) -> Plan:
    """The best layout of the whole cluster, and everything around it."""
    ask.check()
    model, cluster = ask.model, ask.cluster
    found = search(model, cluster, ask.batch, ask.stack, keep=LAYOUTS, fixed=ask.fixed)
    top, faults = found.best, _faults(ask)
    time_s = _time_s(ask, top, faults)
    each = top.network_bytes / top.step_s
    return Plan(
        model=model.name,
        parameters=model.parameters(),
        active_parameters=model.active_parameters(),
        tokens=ask.tokens,
        gpu=cluster.accelerator.name,
        nodes=cluster.nodes,
        gpus=cluster.gpus,
        batch=top.layout.batch,
        sequence=model.sequence,
        layout=top.layout.words(),
        best=top,
        parts=top.parts,
        memory_room=cluster.accelerator.memory_bytes,
        time_s=time_s,
        faults=faults,
        cost=money.cost(cluster.gpus, time_s / 3600, ask.rates),
        network_bytes_per_s=each,
        bisection_bytes_per_s=each * cluster.gpus / 2,
        read_bytes_per_s=4 * top.tokens_s,
        layouts=[point(ask, one) for one in found.ranked],
        families=list(found.families),
        kinds=kinds(ask),
        limits=limits.what_limits(model, cluster, top, ask.stack),
        sizes=_sizes(ask, top),
    )


def _faults(ask: Ask) -> Goodput:
    storage = ask.storage_bytes_per_s or STORAGE_BYTES_PER_S_PER_NODE * ask.cluster.nodes
    faults = Faults(
        per_gpu_hour=ask.per_gpu_hour, restart_s=ask.restart_s, storage_bytes_per_s=storage
    )
    return goodput(ask.cluster.gpus, CHECKPOINT_BYTES * ask.model.parameters(), faults)


def _time_s(ask: Ask, found: Estimate, faults: Goodput) -> float:
    if faults.goodput <= 0:
        raise Impossible(
            f"one of {ask.cluster.gpus:,} GPUs fails every {_hours(faults.mean_between_s)}, and a "
            f"checkpoint takes {_hours(faults.save_s)}: give faster storage or fewer nodes"
        )
    return ask.tokens / found.tokens_s / faults.goodput


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds < 3.6e8 else f"{seconds / 3.15e7:,.0f} years"


def _sizes(ask: Ask, top: Estimate) -> list[Point]:
    """Other sizes of the cluster. Those that cannot be are left out."""
    points = []
    for nodes in sorted({round(ask.cluster.nodes * size) for size in SIZES} - {0}):
        try:
            points.append(point(ask.on(nodes), top if nodes == ask.cluster.nodes else None))
        except Impossible:
            continue
    return points


def kinds(ask: Ask) -> list[Kind]:
    """Each kind of parallelism alone, over as many GPUs as it can use: one sequence at a
    time, everything recomputed."""
    model, gpus = ask.model, ask.cluster.gpus
    room = ask.cluster.accelerator.memory_bytes
    tensor = _largest(
        lambda n: not model.heads % n and not model.ffn_size % n, min(gpus, ask.cluster.node.gpus)
    )
    stages = _largest(lambda n: not model.layers % n, min(gpus, model.layers))
    context = _largest(lambda n: not model.sequence % n, min(gpus, 64))
    expert = (
        _largest(lambda n: not model.experts % n, min(gpus, model.experts)) if model.experts else 1
    )
    layouts = {
        "DDP": Layout(data=gpus, zero=0),
        "ZeRO-1": Layout(data=gpus, zero=1),
        "ZeRO-2": Layout(data=gpus, zero=2),
        "FSDP (ZeRO-3)": Layout(data=gpus, zero=3),
        f"tensor {tensor}": Layout(tensor=tensor, zero=0),
        f"pipeline {stages}": Layout(pipeline=stages, micro_batches=stages, zero=0),
        f"context {context}": Layout(context=context, zero=0),
        f"expert {expert}": Layout(data=expert, expert=expert, zero=0),
    }
    found = []
    for name, layout in layouts.items():
        if name.endswith(" 1") or problem(model, layout):
            continue
        used = memory(model, msgspec.structs.replace(layout, recompute="full"), ask.stack)
        found.append(Kind(name=name, memory=used, fits=used.total <= room))
    return found


def _largest(allowed: object, most: int) -> int:
    assert callable(allowed)
    return next(n for n in range(max(1, most), 0, -1) if n == 1 or allowed(n))
