"""Requests for a fleet of LLM servers: arrivals and token counts from public traces, and the model
of a server that turns tokens into time."""

from __future__ import annotations

import csv
import datetime
import gzip
import heapq
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

# Speeds of one replica: prompts are read and answers written independently in each stream.
PREFILL_TOKENS_PER_S = 8_000
DECODE_TOKENS_PER_S = 30
OVERHEAD_MS = 50
WINDOW_S = 600  # of the rates in servegen
DAY_S = 86_400


class LoadError(Exception):
    """The trace cannot be used; the message has the reason."""


class Request(NamedTuple):
    at_ms: int
    service_ms: int


def service_ms(prompt_tokens: int, answer_tokens: int) -> int:
    read_ms = 1000 * prompt_tokens // PREFILL_TOKENS_PER_S
    return OVERHEAD_MS + read_ms + 1000 * answer_tokens // DECODE_TOKENS_PER_S


def read_azure(path: Path, times: int = 1) -> list[Request]:
    """`times` as many requests: each is repeated within ten seconds of its time."""
    found = []
    rng = random.Random("azure")
    begin: datetime.datetime | None = None
    for row in _rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
        begin = begin or at
        at_ms = int((at - begin).total_seconds() * 1000)
        took_ms = service_ms(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for copy in range(times):
            found.append(Request(at_ms + (rng.randrange(10_000) if copy else 0), took_ms))
    return sorted(found)


def read_mooncake(path: Path) -> list[Request]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return sorted(
        Request(row["timestamp"], service_ms(row["input_length"], row["output_length"]))
        for row in rows
    )


def read_day(
    path: Path, lengths: Sequence[Request], mean_rps: float, model: str, day: int = 0
) -> list[Request]:
    """A day of a servegen model, the first or a later one, scaled to `mean_rps`; arrivals within a
    window of ten minutes are drawn (Poisson), lengths are drawn from another trace."""
    rates = [
        (int(row["t_s"]) - day * DAY_S, float(row["rate_rps"]))
        for row in _rows(path, ("model", "t_s", "rate_rps"))
        if row["model"] == model and 0 <= int(row["t_s"]) - day * DAY_S < DAY_S
    ]
    if not rates:
        raise LoadError(f"{path}: no rates of model {model!r}")
    factor = mean_rps / (sum(rate for _, rate in rates) / len(rates))
    rng = random.Random(f"day{day or ''}")
    found = []
    for start_s, rate in rates:
        at_s = start_s + rng.expovariate(rate * factor)
        while at_s < start_s + WINDOW_S:
            found.append(Request(int(1000 * at_s), rng.choice(lengths).service_ms))
            at_s += rng.expovariate(rate * factor)
    return found


def _rows(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror or error}") from None
    missing = [name for name in columns if not rows or name not in rows[0]]
    if missing:
        raise LoadError(f"{path}: no column {missing[0]!r}")
    return rows


class Replica:
    __slots__ = ("draining", "id", "in_flight")

    def __init__(self, replica_id: str) -> None:
        self.id = replica_id
        self.in_flight = 0
        self.draining = False


class Fleet:
    """Ready replicas behind one queue, as in the gateway: a request goes to the replica with the
    fewest in flight, or waits for the first free one."""

    def __init__(self, requests: Sequence[Request], concurrency: int) -> None:
        self.requests = requests
        self.concurrency = concurrency
        self.replicas: dict[str, Replica] = {}
        self.waits_ms: list[int] = []  # in order of begin
        self.slow: int = 0  # took more than 1.5 times as long as needed
        self._queue: list[Request] = []
        self._queue_from = 0
        self._next = 0
        self._ends: list[tuple[int, str]] = []
        self._free = 0

    @property
    def in_flight(self) -> int:
        return len(self._ends)

    @property
    def queued(self) -> int:
        return len(self._queue) - self._queue_from

    @property
    def done(self) -> bool:
        return self._next >= len(self.requests) and not self._ends and not self.queued

    def add(self, replica_id: str, now_ms: int) -> None:
        self.replicas[replica_id] = Replica(replica_id)
        self._free += self.concurrency
        self._begin(now_ms)

    def drain(self, replica_id: str) -> None:
        replica = self.replicas[replica_id]
        if not replica.draining:
            replica.draining = True
            self._free -= self.concurrency - replica.in_flight

    def remove(self, replica_id: str) -> None:
        """Its requests in flight are lost, so a scaler should drain a replica first."""
        self.drain(replica_id)
        del self.replicas[replica_id]

    def advance(self, now_ms: int) -> None:
        """Processes all arrivals and completions until `now_s`."""
        requests, ends = self.requests, self._ends
        while True:
            arrival_ms = requests[self._next].at_ms if self._next < len(requests) else now_ms + 1
            end_ms = ends[0][0] if ends else now_ms + 1
            if min(arrival_ms, end_ms) > now_ms:
                return
            if end_ms <= arrival_ms:
                _, replica_id = heapq.heappop(ends)
                replica = self.replicas.get(replica_id)
                if replica is not None:
                    replica.in_flight -= 1
                    self._free += not replica.draining
                self._begin(end_ms)
            else:
                self._queue.append(requests[self._next])
                self._next += 1
                self._begin(arrival_ms)

    def _begin(self, now_ms: int) -> None:
        while self._free > 0 and self._queue_from < len(self._queue):
            request = self._queue[self._queue_from]
            self._queue_from += 1
            open_ = (replica for replica in self.replicas.values() if not replica.draining)
            replica = min(open_, key=lambda replica: replica.in_flight)
            replica.in_flight += 1
            self._free -= 1
            heapq.heappush(self._ends, (now_ms + request.service_ms, replica.id))
            wait_ms = now_ms - request.at_ms
            self.waits_ms.append(wait_ms)
            self.slow += 2 * wait_ms > request.service_ms
        if self._queue_from > 10_000:
            del self._queue[: self._queue_from]
            self._queue_from = 0

    def kept(self, within_ms: int) -> float:
        """The share of all requests that began in time; those that never began did not."""
        return sum(wait <= within_ms for wait in self.waits_ms) / max(1, len(self.requests))


def work_over_time(requests: Sequence[Request], look_ms: int) -> list[int]:
    """The requests in flight at each look if no request ever waited."""
    changes: dict[int, int] = {}
    for request in requests:
        changes[request.at_ms // look_ms] = changes.get(request.at_ms // look_ms, 0) + 1
        end = (request.at_ms + request.service_ms) // look_ms + 1
        changes[end] = changes.get(end, 0) - 1
    level, found = 0, []
    for look in range(max(changes) + 1):
        level += changes.get(look, 0)
        found.append(level)
    return found


Scaler = Callable[[int, Fleet, int], int]  # now, the fleet, wanted so far -> wanted
