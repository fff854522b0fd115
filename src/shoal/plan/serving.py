"""How many replicas a service needs, of which size: from a modeled or a measured server.

The latency of a modeled replica comes from a simulation of its queue (`queue.py`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shoal.plan.hardware import Cluster, Impossible, at_least, at_most
from shoal.plan.model import Model

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


def modeled(model: Model, cluster: Cluster, gpus: int, precision: str = "bf16") -> Server:
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
            server = modeled(model, cluster, gpus, precision)
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


# One replica of a server under a load: a seeded simulation of its batches and its queue.
#
# The server batches continuously, as vLLM does: each step decodes one token of every running
# request, and takes in a piece of the prompts that wait. A step takes as long as its arithmetic or
# its reading of weights and cached keys and values, whichever is longer.


STEP_S = 1e-3  # of the host, for each step: choosing what runs, sampling
CHUNK_TOKENS = 2048  # prompt tokens and decoded tokens of one step, at most
SEQUENCES_MAX = 256  # requests in a batch
REQUESTS = 1200  # in a simulation
WARM_UP = 0.2  # of them are not counted
LONGEST = 8  # times the mean: a longer prompt or output is cut
QUANTILE = 0.9
BACKLOG_MAX = 0.05  # with more, requests come faster than they are served
RATE_MAX, TOKENS_MAX = 1e6, 10_000_000


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests per second, and how long they are on average, in tokens."""

    rate: float
    input: int
    output: int

    def check(self) -> Load:
        if not self.rate > 0:
            raise Impossible(f"rate is {self.rate:g}: it must be more than 0")
        at_most("rate", self.rate, RATE_MAX)
        for name, value in (("input", self.input), ("output", self.output)):
            at_least(name, value, 1)
            at_most(name, value, TOKENS_MAX)
        return self


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """For nine of ten requests: time to the first token, and per token after it."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf


class Request(NamedTuple):
    at_s: float
    input: int
    output: int


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Of one replica under a load: medians, and what nine of ten requests stay below."""

    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    batch: float  # requests that are decoded at a time, on average
    busy: float  # share of the time
    backlog: float  # share of the requests that still wait when the last one arrives

    def meets(self, goals: Goals) -> bool:
        within = self.ttft_p90_s <= goals.ttft_s and self.tpot_p90_s <= goals.tpot_s
        return within and self.backlog <= BACKLOG_MAX


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: how long a step takes, and how many tokens it can remember."""

    gpus: int
    weight_bytes: float
    dense_bytes: float  # of them, those that every step reads
    expert_share: float  # of the experts, that one token uses; 0: a dense model
    cache_tokens: int
    cache_bytes: float  # of one token
    token_s: float  # arithmetic of one token
    attention_s: float  # arithmetic of one token per token before it
    read_s: float  # of one byte, by all GPUs together
    reduce_s: float  # all-reduces of one step, without their bytes
    reduce_token_s: float  # their bytes, of one token
    step_s: float = STEP_S
    sequences_max: int = SEQUENCES_MAX

    def takes_s(self, prompt: int, prompt_context: float, decoded: int, context: float) -> float:
        """A step that takes in `prompt` tokens with that many before each of them, and decodes one
        token of each of `decoded` requests with `context` tokens in all."""
        tokens = prompt + decoded
        seen = prompt * prompt_context + context
        compute = tokens * self.token_s + seen * self.attention_s
        touched = 1.0 if not self.expert_share else 1 - (1 - self.expert_share) ** tokens
        weights = self.dense_bytes + (self.weight_bytes - self.dense_bytes) * touched
        read = (weights + context * self.cache_bytes) * self.read_s
        return max(compute, read) + self.reduce_s + tokens * self.reduce_token_s + self.step_s


def poisson(load: Load, count: int = REQUESTS, seed: int = 0) -> list[Request]:
    """Requests at random times; their lengths vary as exponential random numbers do."""
    chance, now, made = random.Random(seed), 0.0, []
    for _ in range(count):
        now += chance.expovariate(load.rate)
        sizes = [
            min(max(1, round(chance.expovariate(1 / mean))), LONGEST * mean)
            for mean in (load.input, load.output)
        ]
        made.append(Request(now, *sizes))
    return made


class _Running:
    """The state of a simulated replica between two steps."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.now_s = self.busy_s = self.batch_s = 0.0
        self.step = 0
        self.context = self.reserved = 0
        self.prompts: deque[list[int]] = deque()  # request, tokens that are left
        self.decoded: list[tuple[int, int]] = []  # step of the last token, request: a heap

    @property
    def active(self) -> int:
        return len(self.prompts) + len(self.decoded)


def simulate(server: Server, requests: Sequence[Request]) -> Latency:
    """Every request in the order of arrival, on one replica."""
    state, waiting, arrived, backlog = _Running(server), 0, 0, -1
    first, last = [0.0] * len(requests), [0.0] * len(requests)
    while waiting < len(requests) or state.active:
        while arrived < len(requests) and requests[arrived].at_s <= state.now_s:
            arrived += 1
        while waiting < arrived and state.active < server.sequences_max:
            need = requests[waiting].input + requests[waiting].output
            if state.active and state.reserved + need > server.cache_tokens:
                break
            state.reserved += need
            state.prompts.append([waiting, requests[waiting].input])
            waiting += 1
        if arrived == len(requests) and backlog < 0:
            backlog = arrived - waiting
        if not state.active:
            state.now_s = requests[arrived].at_s
            continue
        until_s = requests[arrived].at_s if arrived < len(requests) else math.inf
        _advance(state, requests, first, last, until_s)
    counted = range(int(WARM_UP * len(requests)), len(requests))
    ttft = sorted(first[i] - requests[i].at_s for i in counted)
    tpot = sorted(
        (last[i] - first[i]) / (requests[i].output - 1) for i in counted if requests[i].output > 1
    )
    return Latency(
        ttft_p50_s=_at(ttft, 0.5),
        ttft_p90_s=_at(ttft, QUANTILE),
        tpot_p50_s=_at(tpot, 0.5),
        tpot_p90_s=_at(tpot, QUANTILE),
        batch=state.batch_s / max(state.busy_s, 1e-9),
        busy=state.busy_s / max(state.now_s, 1e-9),
        backlog=max(0, backlog) / max(1, len(requests)),
    )


def _advance(
    state: _Running,
    requests: Sequence[Request],
    first: list[float],
    last: list[float],
    until_s: float,
) -> None:
    """One step; without prompts, as many equal ones as there are before something changes."""
    server, decoded = state.server, len(state.decoded)
    budget, taken, seen, ready, steps = CHUNK_TOKENS - decoded, 0, 0.0, [], 1
    while state.prompts and budget > taken:
        request, left = state.prompts[0]
        piece = min(left, budget - taken)
        seen += piece * (requests[request].input - left + piece / 2)
        taken += piece
        state.prompts[0][1] -= piece
        if piece == left:
            ready.append(request)
            state.prompts.popleft()
    takes_s = server.takes_s(taken, seen / taken if taken else 0.0, decoded, state.context)
    if not taken:
        ends = state.decoded[0][0] - state.step
        steps = max(
            1,
            min(ends, math.ceil((until_s - state.now_s) / takes_s) if until_s < math.inf else ends),
        )
        takes_s = steps * server.takes_s(0, 0.0, decoded, state.context + decoded * (steps - 1) / 2)
    state.now_s += takes_s
    state.busy_s += takes_s
    state.batch_s += takes_s * decoded
    state.step += steps
    state.context += decoded * steps
    for request in ready:
        first[request] = last[request] = state.now_s
        state.context += requests[request].input
        heapq.heappush(state.decoded, (state.step + requests[request].output - 1, request))
    while state.decoded and state.decoded[0][0] <= state.step:
        request = heapq.heappop(state.decoded)[1]
        one = requests[request]
        last[request] = state.now_s
        state.context -= one.input + one.output - 1
        state.reserved -= one.input + one.output


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
