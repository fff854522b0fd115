"""How many replicas a service needs, of which size: from a modelled or a measured server.

The latency of a modelled replica comes from a simulation of its queue (`queue.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from shoal.plan.hardware import Cluster
from shoal.plan.impossible import Impossible, at_most
from shoal.plan.model import Model
from shoal.plan.queue import RATE_MAX, Goals, Latency, Load, Server, poisson, simulate

BYTES = {"bf16": 2, "fp16": 2, "fp8": 1}
MEMORY_SHARE = 0.9  # of a GPU for weights and the cache; vLLM's default
READ_SHARE = 0.7  # of the memory's bandwidth that a decoding step reaches
REDUCE_S = 10e-6  # one all-reduce of a few bytes within a node
LINK_SHARE = 0.8  # of the links' rate that an all-reduce reaches
GPUS_PER_REPLICA = (1, 2, 4, 8, 16, 32)
NODES_PER_REPLICA = 4
ROUNDS = 14  # of a bisection
REPLICAS_MAX = 1_000_000


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of one size. `rate_max` is the most that one of them takes within the goals."""

    gpus: int  # of one replica
    replicas: int
    rate_max: float
    latency: Latency | None  # None: from a measured server, whose points say it
    cache_tokens: int = 0

    @property
    def total_gpus(self) -> int:
        return self.gpus * self.replicas


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The choices that meet the goals, fewest GPUs first; and why other sizes do not."""

    choices: list[Choice]
    problems: dict[int, str]  # by GPUs of a replica


def cache_bytes_per_token(model: Model) -> float:
    """Keys and values of all layers in 16 bits, or the vector of multi-head latent attention."""
    if model.kv_rank:
        return 2.0 * model.layers * (model.kv_rank + model.rope_head)
    return 4.0 * model.layers * model.kv_width


def modelled(model: Model, cluster: Cluster, gpus: int, precision: str = "bf16") -> Server:
    """A replica on this many GPUs; Impossible says why it cannot be."""
    chip, node = cluster.accelerator, cluster.node
    if model.heads % gpus:
        raise Impossible(f"{gpus} GPUs do not divide the {model.heads} heads of {model.name}")
    size = BYTES.get(precision)
    if size is None:
        raise Impossible(f"precision is {precision!r}: use one of {', '.join(BYTES)}")
    weights = float(model.parameters() * size)
    room = gpus * chip.memory_bytes * MEMORY_SHARE - weights
    if room <= 0:
        raise Impossible(
            f"its weights are {weights / 1e9:,.0f} GB, and {gpus} x {chip.name} have room for "
            f"{gpus * chip.memory_bytes * MEMORY_SHARE / 1e9:,.0f} GB"
        )
    experts = model.expert_layers * model.experts * model.expert_weights() * size
    flops = gpus * chip.peak(precision) * chip.matmul
    inside = gpus <= node.gpus
    link = chip.link_gbs * 1e9 if inside else node.nic_gbs * 1e9
    reduce_s = REDUCE_S if inside else REDUCE_S + 2 * cluster.fabric.latency_us * 1e-6
    message = 2.0 * model.hidden * 2 * (gpus - 1) / gpus  # an all-reduce of 16-bit numbers
    reduces = 2 * model.layers if gpus > 1 else 0
    return Server(
        gpus=gpus,
        weight_bytes=weights,
        dense_bytes=weights - experts,
        expert_share=model.experts_active / model.experts if model.experts else 0.0,
        cache_tokens=int(room / cache_bytes_per_token(model)),
        cache_bytes=cache_bytes_per_token(model),
        token_s=2.0 * model.matmul_weights() / flops,
        attention_s=model.layers
        * model.attention_flops(1)
        / (gpus * chip.peak("bf16") * chip.flash),
        read_s=1 / (gpus * (chip.copy_gbs or chip.memory_gbs * READ_SHARE) * 1e9),
        reduce_s=reduces * reduce_s,
        reduce_token_s=reduces * message / (link * LINK_SHARE),
    )


def capacity(server: Server, load: Load, goals: Goals) -> float:
    """The most requests per second that one replica takes within the goals; 0: not even a few."""

    def meets(rate: float) -> bool:
        return simulate(server, poisson(msgspec.structs.replace(load, rate=rate))).meets(goals)

    alone = server.takes_s(load.input, load.input / 2, 0, 0) + load.output * server.takes_s(
        0, 0, 1, load.input + load.output / 2
    )
    low, high = 0.02 / alone, 0.1 / alone
    if not meets(low):
        return 0.0
    while meets(high) and high < RATE_MAX:
        low, high = high, 2 * high
    for _ in range(ROUNDS // 2):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def choose(
    model: Model, cluster: Cluster, load: Load, goals: Goals, precision: str = "bf16"
) -> Serving:
    """All sizes of a replica, fewest GPUs in all first; Impossible if no size meets the goals."""
    load.check()
    choices: list[Choice] = []
    problems: dict[int, str] = {}
    for gpus in GPUS_PER_REPLICA:
        if gpus > NODES_PER_REPLICA * cluster.node.gpus or (choices and gpus > cluster.node.gpus):
            break  # beyond one node only if nothing on one node will do
        try:
            server = modelled(model, cluster, gpus, precision)
            choices.append(_choice(server, load, goals))
        except Impossible as error:
            problems[gpus] = str(error)
    if not choices:
        raise Impossible(_nothing(model, problems))
    choices.sort(key=lambda one: (one.total_gpus, one.gpus))
    return Serving(choices=choices, problems=problems)


def _choice(server: Server, load: Load, goals: Goals) -> Choice:
    longest = load.input + load.output
    if longest > server.cache_tokens:
        raise Impossible(
            f"its cache holds {server.cache_tokens:,} tokens, and one request has {longest:,}"
        )
    rate = capacity(server, load, goals)
    if not rate:
        raise Impossible(_missed(server, load, goals))
    replicas = max(1, math.ceil(load.rate / rate))
    at_most("replicas", replicas, REPLICAS_MAX)
    each = msgspec.structs.replace(load, rate=load.rate / replicas)
    return Choice(
        gpus=server.gpus,
        replicas=replicas,
        rate_max=rate,
        latency=simulate(server, poisson(each)),
        cache_tokens=server.cache_tokens,
    )


def _missed(server: Server, load: Load, goals: Goals) -> str:
    quiet = simulate(server, poisson(msgspec.structs.replace(load, rate=1e-3), 200))
    if quiet.tpot_p90_s > goals.tpot_s:
        shown = f"{1000 * quiet.tpot_p90_s:.0f} ms per token"
    else:
        shown = f"{1000 * quiet.ttft_p90_s:.0f} ms to the first token"
    return f"even an idle replica needs {shown}"


def _nothing(model: Model, problems: dict[int, str]) -> str:
    most = max(problems)
    return f"no replica of {model.name} meets the goals: with {most} GPUs, {problems[most]}"


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one measured replica did at a rate: for nine of ten requests."""

    rate: float
    ttft_s: float = 0.0
    tpot_s: float = 0.0


def measured(points: Sequence[Point], gpus: int, load: Load, goals: Goals) -> Choice:
    """Replicas of a server that was measured, without a model: the rate at which its measured
    latency reaches a goal, in proportion between two points; nothing beyond the last point."""
    load.check()
    ordered = sorted(points, key=lambda point: point.rate)
    if not ordered:
        raise Impossible("the measurement has no points: give at least one rate with its latency")
    rate = 0.0
    for before, point in zip([None, *ordered], ordered, strict=False):
        if point.ttft_s <= goals.ttft_s and point.tpot_s <= goals.tpot_s:
            rate = point.rate
            continue
        if before is not None:
            rate = before.rate + (point.rate - before.rate) * min(
                _part(before.ttft_s, point.ttft_s, goals.ttft_s),
                _part(before.tpot_s, point.tpot_s, goals.tpot_s),
            )
        break
    if rate <= 0:
        one = ordered[0]
        raise Impossible(
            f"the measured server misses the goals at its lowest rate already: at {one.rate:g}/s "
            f"it has {1000 * one.ttft_s:.0f} ms to the first token and {1000 * one.tpot_s:.0f} ms "
            "per token"
        )
    replicas = max(1, math.ceil(load.rate / rate))
    at_most("replicas", replicas, REPLICAS_MAX)
    return Choice(gpus=gpus, replicas=replicas, rate_max=rate, latency=None)


def _part(before: float, after: float, goal: float) -> float:
    return 1.0 if after <= goal else (goal - before) / (after - before)
