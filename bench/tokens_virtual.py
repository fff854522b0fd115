"""Plays requests through a policy and simulated engines on virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from statistics import fmean

import msgspec
from harness.engine.model import Engine, Table
from harness.engine.model import Sequence as Running

from bench.figures import percentile
from bench.token_policies import Policy
from bench.token_traces import Request

ARRIVES, RUN_ENDS = 0, 1


class Outcome(msgspec.Struct, frozen=True):
    """Of one run. Times are until the first token, and between two in the mean of a request."""

    hit: float  # of all tokens of prompts
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    itl_p99_ms: float
    good: float  # requests that met both goals
    imbalance: float  # of the busiest engine's time over the mean
    requests: int
    failed: int = 0


class Goal(msgspec.Struct, frozen=True):
    ttft_ms: float = 5_000
    itl_ms: float = 100


class Answered(msgspec.Struct, frozen=True):
    ttft_ms: float
    itl_ms: float  # nan: one token
    prompt: int
    cached: int


def outcome(
    answered: Sequence[Answered], busy: Sequence[float], goal: Goal, failed: int = 0
) -> Outcome:
    ttfts = [each.ttft_ms for each in answered]
    itls = [each.itl_ms for each in answered if not math.isnan(each.itl_ms)] or [0.0]
    good = sum(each.ttft_ms <= goal.ttft_ms and not each.itl_ms > goal.itl_ms for each in answered)
    return Outcome(
        hit=round(sum(each.cached for each in answered) / sum(e.prompt for e in answered), 4),
        ttft_mean_ms=round(fmean(ttfts), 1),
        ttft_p50_ms=round(percentile(ttfts, 50), 1),
        ttft_p99_ms=round(percentile(ttfts, 99), 1),
        itl_mean_ms=round(fmean(itls), 2),
        itl_p99_ms=round(percentile(itls, 99), 2),
        good=round(good / (len(answered) + failed), 4),
        imbalance=round(max(busy) / fmean(busy), 3) if fmean(busy) else 1.0,
        requests=len(answered) + failed,
        failed=failed,
    )


def play(
    requests: Sequence[Request],
    policy: Policy,
    engines: int,
    table: Table,
    goal: Goal,
) -> Outcome:
    fleet = [Engine(table) for _ in range(engines)]
    epochs = [0] * engines
    answered: list[Answered] = []
    events: list[tuple[float, int, int, int]] = []  # when, what, which engine, its epoch
    arriving = 0

    def run(index: int, end_ms: float | None) -> None:
        epochs[index] += 1
        if end_ms is not None:
            heapq.heappush(events, (end_ms, RUN_ENDS, index, epochs[index]))

    while True:
        due_ms = requests[arriving].at_ms if arriving < len(requests) else math.inf
        if events and events[0][0] <= due_ms:
            now_ms, _, index, epoch = heapq.heappop(events)
            if epoch != epochs[index]:
                continue
            engine = fleet[index]
            done = engine.finish()
            for each in done.first:
                policy.first(each.id, now_ms)
            for each in done.ended:
                policy.ended(each.id, each.cached, now_ms)
                answered.append(_answered(each))
            run(index, engine.begin(now_ms, 1 << 30))
        elif arriving < len(requests):
            request = requests[arriving]
            index = policy.choose(request, arriving, due_ms)
            engine = fleet[index]
            engine.submit(Running(arriving, request.blocks, request.prompt, request.answer), due_ms)
            arriving += 1
            if not engine.working:
                run(index, engine.begin(due_ms, 1 << 30))
            elif (end_ms := engine.cut(due_ms)) is not None:
                run(index, end_ms)
        else:
            break
    return outcome(answered, [engine.busy_ms for engine in fleet], goal)


def _answered(each: Running) -> Answered:
    ttft_ms = each.first_ms - each.submitted_ms
    gaps = each.answer - 1
    itl_ms = (each.last_ms - each.first_ms) / gaps if gaps else math.nan
    return Answered(ttft_ms, itl_ms, each.prompt, each.cached)
