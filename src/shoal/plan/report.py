"""A whole plan of a training run: layout, time, failures, money, and what they depend on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from shoal.model.amounts import listed, money_text, time_words
from shoal.model.resources import plural
from shoal.plan import money
from shoal.plan.hardware import Accelerator, Cluster, Curve, Impossible, at_most
from shoal.plan.layout import Layout, Memory, Stack, memory, problem
from shoal.plan.model import Model
from shoal.plan.search import Family, search
from shoal.plan.step import Estimate, Parts, estimate

# How often a run is interrupted, how often it should save, and how much of its time is work.
#
# Failures arrive at random with a constant rate (a Poisson process). Sources: the rate is that of
# the Llama 3 405B run (arXiv 2407.21783, table 5), the interval that of Daly (Future Generation
# Computer Systems 22, 2006), whose first term is Young's (CACM 17, 1974).


HOUR_S = 3600.0

# 54 days of Llama 3 405B: 419 unexpected interruptions on 16,384 GPUs, one per 50,700 GPU-hours.
LLAMA3_INTERRUPTIONS, LLAMA3_GPUS, LLAMA3_DAYS = 419, 16_384, 54
PER_GPU_HOUR = LLAMA3_INTERRUPTIONS / (LLAMA3_GPUS * LLAMA3_DAYS * 24)

# Found, replaced, started, warmed up again. No source measures all of it: an assumption.
RESTART_S = 600.0
# What Llama 3's storage sustains: 2 TB/s for the 2,048 nodes of that run.
STORAGE_BYTES_PER_S_PER_NODE = 1e9
# How much of the time saving and repeating may cost before better storage is worth a sentence.
SAVING_SHARE = 0.03
NEVER = math.inf


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What is assumed about a cluster's failures and its storage."""

    per_gpu_hour: float = PER_GPU_HOUR
    restart_s: float = RESTART_S
    storage_bytes_per_s: float = NEVER  # of the whole cluster


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """What failures do to a run of many GPUs. Shares are of the run's whole time and add up to 1
    with `goodput`: the share in which work was done that was kept."""

    gpus: int
    failures_per_day: float
    mean_between_s: float
    checkpoint_bytes: float
    save_s: float
    load_s: float
    restart_s: float  # with the load
    interval_s: float  # of work between two checkpoints
    goodput: float
    saving: float
    repeating: float
    restarting: float
    storage_needed_bytes_per_s: float  # so that saving and repeating cost SAVING_SHARE at most


def mean_between_s(gpus: int, per_gpu_hour: float = PER_GPU_HOUR) -> float:
    """Seconds between two failures of any of these GPUs."""
    rate = gpus * per_gpu_hour
    return HOUR_S / rate if rate > 0 else NEVER


def young_s(save_s: float, between_s: float) -> float:
    """Work between two checkpoints by Young: the square root of 2 x save x mean time between."""
    return math.sqrt(2 * save_s * between_s)


def daly_s(save_s: float, between_s: float) -> float:
    """Work between two checkpoints by Daly's higher order estimate."""
    if between_s == NEVER:
        return NEVER
    if save_s >= 2 * between_s:
        return between_s
    part = save_s / (2 * between_s)
    return young_s(save_s, between_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


class Shares(NamedTuple):
    """Where the time goes; the four add up to 1."""

    work: float
    saving: float
    repeating: float
    restarting: float


def shares(interval_s: float, save_s: float, restart_s: float, between_s: float) -> Shares:
    """Daly's complete model, which also counts failures during a save or a restart: to keep
    `interval` seconds of work takes  M e^(R/M) (e^((interval + save)/M) - 1)  seconds."""
    if between_s == NEVER:
        return Shares(1.0, 0.0, 0.0, 0.0)
    segment = (interval_s + save_s) / between_s
    if segment > 500 or restart_s / between_s > 500:
        return Shares(0.0, 0.0, 0.0, 1.0)  # it never gets from one checkpoint to the next
    attempts = math.expm1(segment) * between_s  # without restarts
    whole = math.exp(restart_s / between_s) * attempts
    work, saving = interval_s / whole, save_s / whole
    repeating = (attempts - interval_s - save_s) / whole
    return Shares(work, saving, repeating, 1 - work - saving - repeating)


def goodput(gpus: int, checkpoint_bytes: float, faults: Faults) -> Goodput:
    """With Daly's interval between checkpoints."""
    between_s = mean_between_s(gpus, faults.per_gpu_hour)
    save_s = checkpoint_bytes / faults.storage_bytes_per_s
    restart_s = faults.restart_s + save_s  # it loads as fast as it saves
    interval_s = daly_s(save_s, between_s)
    found = shares(interval_s, save_s, restart_s, between_s)
    return Goodput(
        gpus=gpus,
        failures_per_day=24 * HOUR_S / between_s,
        mean_between_s=between_s,
        checkpoint_bytes=checkpoint_bytes,
        save_s=save_s,
        load_s=save_s,
        restart_s=restart_s,
        interval_s=interval_s,
        goodput=found.work,
        saving=found.saving,
        repeating=found.repeating,
        restarting=found.restarting,
        storage_needed_bytes_per_s=storage_needed(checkpoint_bytes, between_s),
    )


def storage_needed(checkpoint_bytes: float, between_s: float) -> float:
    """At Daly's interval, saving and repeating cost about sqrt(2 x save / M) of the time."""
    return checkpoint_bytes / (between_s * SAVING_SHARE**2 / 2)


CHECKPOINT_BYTES = 14  # of a parameter: its weight in 16 bits, and Adam's states in 32
TOKENS_MAX = 1e18
BATCH_TOKENS = 4 * 2**20  # of a step, unless said otherwise
BATCH_TOKENS_LARGE, LARGE = 16 * 2**20, 100e9  # as Llama 3 405B was trained
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the nodes, for the curve
LAYOUTS = 5
SMALLEST = 120e6  # parameters: GPT-2's 124 M are the fewest that a plan was compared with


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
    limits: list[Gain]
    sizes: list[Point]
    verdict: str  # the answer in one sentence
    warning: str = ""  # why it may be further off than others


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
    spent = money.cost(cluster.gpus, time_s / 3600, ask.rates)
    limits = what_limits(model, cluster, top, ask.stack)
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
        cost=spent,
        network_bytes_per_s=each,
        bisection_bytes_per_s=each * cluster.gpus / 2,
        read_bytes_per_s=4 * top.tokens_s,
        layouts=[point(ask, one) for one in found.ranked],
        families=list(found.families),
        kinds=kinds(ask),
        limits=limits,
        sizes=_sizes(ask, top),
        verdict=_verdict(cluster, time_s, spent, limits),
        warning=_warning(model),
    )


def _verdict(cluster: Cluster, time_s: float, spent: money.Cost, limits: list[Gain]) -> str:
    """How long, for how much, and what hardware sets the pace."""
    what = f"{plural(cluster.nodes, 'node')} ({cluster.gpus:,} GPUs)"
    verb = "finishes" if cluster.nodes == 1 else "finish"
    price = (
        ""
        if spent.money is None
        else f" for {money_text(float(f'{spent.money:.3g}'), spent.currency)}"
    )
    hardware = [one for one in limits if one.what in LIMITS]
    most = max(one.gain for one in hardware)
    close = [LIMITS[one.what] for one in hardware if one.gain > most - TIED]
    if most < TIED:
        limit = "no single part limits it"
    elif len(close) > 1:
        limit = f"{listed(close)} limit about equally"
    else:
        limit = f"{close[0]} limits"
    return f"{what} {verb} in {time_words(1000 * time_s)}{price}; {limit}."


def _warning(model: Model) -> str:
    if model.parameters() >= SMALLEST:
        return ""
    return (
        f"{model.name} has {model.parameters() / 1e6:.2g}M parameters, and the smallest model that "
        "plans were compared with has 124M; starting kernels, which a plan leaves out, may double "
        "the time of a smaller one, or more"
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


# What a little more of each thing would buy: compute, memory, links, network, nodes, batch.


MORE = 1.1
RATIOS = (1.125, 1.25, 1.5, 2.0)  # of nodes, where a tenth more cannot be shared out


# What may be said to limit a run, and how close two gains are that count as equal.
LIMITS = {
    "compute": "GPU compute",
    "memory": "GPU memory",
    "memory_bandwidth": "memory bandwidth",
    "link": "the bandwidth within nodes",
    "network": "the network",
}
TIED = 0.002


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Ten percent more of one thing."""

    what: str  # compute, memory, memory_bandwidth, link, network, nodes, batch
    words: str
    tokens_s: float  # of the whole cluster, with more of it
    gain: float  # share by which training is faster: 0.1 is in proportion


def what_limits(
    model: Model, cluster: Cluster, found: Estimate, stack: Stack | None = None
) -> list[Gain]:
    """Of each thing ten percent more, the largest gain first. The layout stays the same, except
    that more memory, nodes or batch may make another one the best."""
    chosen = stack or Stack()
    gains = [
        _gain(what, words, found, estimate(model, change(cluster), found.layout, chosen))
        for what, words, change in _CHANGES
    ]
    batch = found.layout.batch
    chip = cluster.accelerator
    roomy = msgspec.structs.replace(
        cluster, accelerator=msgspec.structs.replace(chip, memory_gib=chip.memory_gib * MORE)
    )
    gains.append(_searched("memory", "memory of a GPU", model, roomy, batch, found, chosen))
    gains.append(_more_nodes(model, cluster, batch, found, chosen))
    larger = round(batch * MORE) if batch >= 10 else batch + 1
    more = _searched("batch", "sequences in a batch", model, cluster, larger, found, chosen)
    gains.append(_at_ten_percent(more, found, (MORE - 1) / (larger / batch - 1)))
    return sorted(gains, key=lambda gain: -gain.gain)


def _gain(what: str, words: str, before: Estimate, after: Estimate) -> Gain:
    return Gain(
        what=what,
        words=words,
        tokens_s=after.tokens_s,
        gain=after.tokens_s / before.tokens_s - 1,
    )


def _searched(
    what: str,
    words: str,
    model: Model,
    cluster: Cluster,
    batch: int,
    before: Estimate,
    stack: Stack,
) -> Gain:
    """The best layout with it, against the best without it: a gain is not a better search."""
    try:
        after = search(model, cluster, batch, stack, keep=1).best
    except Impossible:
        return Gain(what=what, words=words, tokens_s=before.tokens_s, gain=0.0)
    return _gain(what, words, before, after if after.tokens_s > before.tokens_s else before)


def _more_nodes(model: Model, cluster: Cluster, batch: int, before: Estimate, stack: Stack) -> Gain:
    """Layouts need numbers with small factors, so several sizes are tried and scaled to a tenth."""
    gains = []
    for nodes in sorted({-(-round(cluster.nodes * 8 * ratio) // 8) for ratio in RATIOS}):
        wider = msgspec.structs.replace(cluster, nodes=max(nodes, cluster.nodes + 1))
        more = _searched("nodes", "nodes, the same batch", model, wider, batch, before, stack)
        scale = (MORE - 1) / (wider.nodes / cluster.nodes - 1)
        gains.append(_at_ten_percent(more, before, scale))
    return max(gains, key=lambda gain: gain.gain)


def _at_ten_percent(gain: Gain, before: Estimate, scale: float) -> Gain:
    share = gain.gain * scale
    return msgspec.structs.replace(gain, gain=share, tokens_s=before.tokens_s * (1 + share))


def _chip(change: Callable[[Accelerator], Accelerator]) -> Callable[[Cluster], Cluster]:
    return lambda cluster: msgspec.structs.replace(cluster, accelerator=change(cluster.accelerator))


def _raised(curve: Curve) -> Curve:
    return tuple((size, rate * MORE) for size, rate in curve)


def _compute(chip: Accelerator) -> Accelerator:
    return msgspec.structs.replace(
        chip,
        peak_tflops={name: rate * MORE for name, rate in chip.peak_tflops.items()},
        matmul_tflops=_raised(chip.matmul_tflops),
    )


def _memory_rate(chip: Accelerator) -> Accelerator:
    return msgspec.structs.replace(
        chip, memory_gbs=chip.memory_gbs * MORE, copy_gbs=chip.copy_gbs * MORE
    )


def _link(cluster: Cluster) -> Cluster:
    chip, node = cluster.accelerator, cluster.node
    return msgspec.structs.replace(
        cluster,
        accelerator=msgspec.structs.replace(chip, link_gbs=chip.link_gbs * MORE),
        node=msgspec.structs.replace(node, link_busbw=_raised(node.link_busbw)),
    )


def _network(cluster: Cluster) -> Cluster:
    node, fabric = cluster.node, cluster.fabric
    return msgspec.structs.replace(
        cluster,
        node=msgspec.structs.replace(node, nic_gbs=node.nic_gbs * MORE),
        fabric=msgspec.structs.replace(fabric, busbw=_raised(fabric.busbw)),
    )


_CHANGES: tuple[tuple[str, str, Callable[[Cluster], Cluster]], ...] = (
    ("compute", "FLOP/s of a GPU", _chip(_compute)),
    ("memory_bandwidth", "memory bandwidth of a GPU", _chip(_memory_rate)),
    ("link", "bandwidth within a node", _link),
    ("network", "bandwidth between nodes", _network),
)
