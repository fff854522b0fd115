"""How requests find an engine, on virtual time: ours, a baseline, and the rules of others.

Each policy sees what its router sees: what it sent where, when the first token came and the answer
ended, and what the engine's `usage` said. None looks into an engine.
"""
# ruff: noqa: ARG002  (all policies have the same methods)

from __future__ import annotations

import bisect
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from bench.token_traces import Request

LOAD_BOUND = 2.0  # of `prefix`: hash-balance-factor 200
RING = 64  # points of a replica
# cache_aware of sglang-router 0.3.2, its defaults
MATCH, BALANCE_MORE, BALANCE_TIMES = 0.3, 64, 1.5


class Policy(Protocol):
    def choose(self, request: Request, number: int, now_ms: float) -> int: ...

    def first(self, number: int, now_ms: float) -> None: ...

    def ended(self, number: int, cached: int, now_ms: float) -> None: ...


class Counting:
    """What most have in common: how many requests are in flight where."""

    def __init__(self, replicas: int) -> None:
        self.in_flight = [0] * replicas
        self.at: dict[int, int] = {}
        self.random = random.Random("policy")

    def choose(self, request: Request, number: int, now_ms: float) -> int:
        chosen = self.pick(request)
        self.in_flight[chosen] += 1
        self.at[number] = chosen
        return chosen

    def pick(self, request: Request) -> int:
        raise NotImplementedError

    def first(self, number: int, now_ms: float) -> None:
        pass

    def ended(self, number: int, cached: int, now_ms: float) -> None:
        self.in_flight[self.at.pop(number)] -= 1

    def least(self) -> int:
        """Of those with the fewest, one after the other, as HAProxy's leastconn."""
        fewest = min(self.in_flight)
        return self.random.choice([i for i, n in enumerate(self.in_flight) if n == fewest])


class Random(Counting):
    def pick(self, request: Request) -> int:
        return self.random.randrange(len(self.in_flight))


class RoundRobin(Counting):
    _next = -1

    def pick(self, request: Request) -> int:
        self._next = (self._next + 1) % len(self.in_flight)
        return self._next


class LeastLoaded(Counting):
    def pick(self, request: Request) -> int:
        return self.least()


class TwoChoices(Counting):
    def pick(self, request: Request) -> int:
        return min(
            self.random.sample(range(len(self.in_flight)), 2), key=self.in_flight.__getitem__
        )


class Prefix(Counting):
    """A consistent hash of the system's message and the first question, within a bound on load."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.ring = sorted(
            (_hash(f"{replica}/{point}"), replica)
            for replica in range(replicas)
            for point in range(RING)
        )

    def pick(self, request: Request) -> int:
        bound = LOAD_BOUND * (sum(self.in_flight) + 1) / len(self.in_flight)
        at = bisect.bisect(self.ring, (_hash(str(tuple(request.blocks[:2]))), 0))
        for step in range(len(self.ring)):
            replica = self.ring[(at + step) % len(self.ring)][1]
            if self.in_flight[replica] + 1 <= bound:
                return replica
        return self.least()


class CacheAware(Counting):
    """sglang's rule: the best match if it is good enough, else the smallest tree; where the load is
    out of balance, the shortest queue."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.trees: list[set[int]] = [set() for _ in range(replicas)]

    def pick(self, request: Request) -> int:
        most, fewest = max(self.in_flight), min(self.in_flight)
        if most - fewest > BALANCE_MORE and most > BALANCE_TIMES * fewest:
            chosen = self.least()
        else:
            matches = [_match(tree, request) for tree in self.trees]
            chosen = max(range(len(matches)), key=matches.__getitem__)
            if matches[chosen] <= MATCH * len(request.blocks):
                chosen = min(range(len(matches)), key=lambda each: len(self.trees[each]))
        self.trees[chosen].update(request.blocks)
        return chosen


class Dynamo(Counting):
    """Dynamo's KV router: blocks to read plus blocks in use, least wins; temperature 0."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.trees: list[set[int]] = [set() for _ in range(replicas)]
        self.reading = [0] * replicas
        self.using: list[Counter[int]] = [Counter() for _ in range(replicas)]
        self.of: dict[int, tuple[int, Request]] = {}

    def choose(self, request: Request, number: int, now_ms: float) -> int:
        news = [len(request.blocks) - _match(tree, request) for tree in self.trees]
        costs = [
            new + self.reading[i] + len(self.using[i].keys() | set(request.blocks))
            for i, new in enumerate(news)
        ]
        least = min(costs)
        chosen = self.random.choice([i for i, cost in enumerate(costs) if cost == least])
        self.at[number], self.of[number] = chosen, (news[chosen], request)
        self.reading[chosen] += news[chosen]
        self.using[chosen].update(request.blocks)
        self.trees[chosen].update(request.blocks)
        return chosen

    def first(self, number: int, now_ms: float) -> None:
        self.reading[self.at[number]] -= self.of[number][0]

    def ended(self, number: int, cached: int, now_ms: float) -> None:
        using = self.using[self.at.pop(number)]
        for block in self.of.pop(number)[1].blocks:
            using[block] -= 1
            if not using[block]:
                del using[block]


def _match(tree: set[int], request: Request) -> int:
    count = 0
    for block in request.blocks:
        if block not in tree:
            break
        count += 1
    return count


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


POLICIES: dict[str, Callable[[int], Policy]] = {
    "round-robin": RoundRobin,
    "random": Random,
    "least-loaded": LeastLoaded,
    "p2c": TwoChoices,
    "prefix": Prefix,
    "sglang's rule": CacheAware,
    "dynamo's rule": Dynamo,
}
