"""Measures how many bytes placement by data spares: the real step, eight nodes, 1,000 jobs.

python bench/data_placement.py [--seeds N]

Nodes have 8 GPUs, a cache of 400 GB and a link of 10 Gbit/s. There are 24 data sets of 20 to
120 GB; some are used far more often than others. A job starts to compute when its node holds its
set. The same jobs run twice: nodes report what they hold, or they do not. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Sequence
from statistics import mean

import msgspec

from bench.figures import machine, table
from shoal.core.nodebook import NodeBook
from shoal.core.policies import SHIPPED
from shoal.core.state.state import State
from shoal.core.step import step
from shoal.model.blocks import Held, volume_key
from shoal.model.commands import Command, Envelope, Launch
from shoal.model.job import JobSpec, MemberRef
from shoal.model.node import NodeSpec
from shoal.model.report import Report, Submit

NODES, GPUS, JOBS, SETS = 8, 8, 1_000, 24
CACHE_BYTES = 400 * 10**9
BYTES_PER_MS = 1_250_000  # 10 Gbit/s
POLICY = msgspec.structs.replace(SHIPPED["fair"], grace_ms=10**12, silent_after_ms=10**11)


class Plan(msgspec.Struct, frozen=True):
    at_ms: int
    spec: JobSpec
    run_ms: int


class Result(msgspec.Struct):
    moved_bytes: int = 0
    waits_ms: list[int] = []
    stays_ms: list[int] = []  # from submission to the end


End = tuple[int, int, tuple[str, MemberRef]]  # when, a number that breaks ties, node and member


class Disk:
    """What a node holds; the least recently used goes first, and what is in use stays."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.sets: dict[str, None] = {}
        self.used: dict[MemberRef, str] = {}

    def fetch(self, ref: MemberRef, name: str) -> int:
        """The bytes that have to come."""
        missing = 0 if name in self.sets else self.sizes[name]
        self.sets.pop(name, None)
        self.sets[name] = None
        self.used[ref] = name
        for other in list(self.sets):
            if sum(map(self.sizes.__getitem__, self.sets)) <= CACHE_BYTES:
                break
            if other not in self.used.values():
                del self.sets[other]
        return missing

    def held(self) -> tuple[Held, ...]:
        return tuple(Held(name, self.sizes[name], self.sizes[name]) for name in self.sets)


def plans(rng: random.Random, sizes: dict[str, int], busy: float) -> list[Plan]:
    """Jobs that ask for `busy` of the GPUs on average."""
    urls = [f"s3://sets/{number}" for number in range(SETS)]
    weights = [1 / (rank + 1) for rank in range(SETS)]
    for url in urls:
        sizes[volume_key("default", url)] = rng.randrange(20, 121) * 10**9
    drawn = []
    for _ in range(JOBS):
        gpus = rng.choice((1, 1, 1, 1, 2, 2, 4, 8))
        run_ms = int(rng.expovariate(1 / 1_200_000)) + 60_000
        (url,) = rng.choices(urls, weights)
        drawn.append((JobSpec(command=("x",), gpus=gpus, volumes=(f"{url}:data",)), run_ms))
    work_ms = sum(spec.gpus * run_ms for spec, run_ms in drawn)
    span_ms = int(work_ms / (NODES * GPUS * busy))
    times = sorted(rng.randrange(span_ms) for _ in drawn)
    return [Plan(at_ms, spec, run_ms) for at_ms, (spec, run_ms) in zip(times, drawn, strict=True)]


class World:
    def __init__(self, jobs: Sequence[Plan], sizes: dict[str, int], *, tells: bool) -> None:
        self.state, self.result, self.tells = State(), Result(), tells
        specs = [
            NodeSpec(
                id=f"n{number}", address=f"n{number}", gpus=GPUS, cpu_milli=64_000, memory_mb=0
            )
            for number in range(NODES)
        ]
        self.books = {spec.id: NodeBook(spec, 1) for spec in specs}
        self.disks = {spec.id: Disk(sizes) for spec in specs}
        self.free_ms = dict.fromkeys(self.books, 0)  # when the link of a node is free again
        self.jobs = {f"j{number}": plan for number, plan in enumerate(jobs, 1)}
        self.number = 0

    def run(self) -> Result:
        events: list[End | tuple[int, int, Plan]] = [
            (plan.at_ms, number, plan) for number, plan in enumerate(self.jobs.values())
        ]
        heapq.heapify(events)
        self.step(0, (), tuple(self.books))
        while events:
            now_ms, _, event = heapq.heappop(events)
            wants, nodes = tuple[Submit, ...](), tuple[str, ...]()
            if isinstance(event, Plan):
                wants = (Submit(event.spec),)
            else:
                node, ref = event
                self.books[node].exited(ref, 0)
                del self.disks[node].used[ref]
                self.result.stays_ms.append(now_ms - self.jobs[ref.job].at_ms)
                nodes = (node,)
            for end in self.step(now_ms, wants, nodes):
                heapq.heappush(events, end)
        return self.result

    def start(self, now_ms: int, node: str, launch: Launch) -> End:
        """Its set comes first, one after the other on each link."""
        plan = self.jobs[launch.ref.job]
        name = volume_key("default", launch.volumes[0].rpartition(":")[0])
        missing = self.disks[node].fetch(launch.ref, name)
        here_ms = now_ms
        if missing:
            here_ms = self.free_ms[node] = max(now_ms, self.free_ms[node]) + missing // BYTES_PER_MS
        self.result.moved_bytes += missing
        self.result.waits_ms.append(here_ms - plan.at_ms)
        return here_ms + plan.run_ms, len(self.jobs) + self.number, (node, launch.ref)

    def step(self, now_ms: int, wants: tuple[Submit, ...], nodes: tuple[str, ...]) -> list[End]:
        """Until nothing follows from what nodes report; returns the ends of what they start."""
        ends: list[End] = []
        while wants or nodes:
            for node in nodes if self.tells else ():
                self.books[node].holdings = self.disks[node].held()
            reports = tuple(self.books[node].report() for node in nodes)
            report = Report(requests=wants, nodes=reports)
            sent: dict[str, list[Command]] = {}
            for command in step(self.state, report, POLICY, now_ms + 1_000).commands:
                sent.setdefault(command.node, []).append(command)
            wants, nodes = (), tuple(sent)
            for node, commands in sent.items():
                self.number += 1
                for action in self.books[node].take(Envelope(1, self.number, tuple(commands))):
                    if isinstance(action, Launch):
                        self.number += 1
                        self.books[node].begins(action.ref)
                        ends.append(self.start(now_ms, node, action))
        return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print(machine())
    rows, figures = [], {}
    for busy in (0.5, 0.8, 0.95):
        both = []
        for tells in (False, True):
            results = []
            for seed in range(seeds):
                sizes: dict[str, int] = {}
                jobs = plans(random.Random(f"{seed}/{busy}"), sizes, busy)
                results.append(World(jobs, sizes, tells=tells).run())
            moved = mean(one.moved_bytes for one in results) / 1e12
            wait_s = mean(mean(one.waits_ms) for one in results) / 1000
            stay_s = mean(mean(one.stays_ms) for one in results) / 1000
            both.append(moved)
            name = "by data" if tells else "without"
            rows.append((f"{busy:.0%}", name, f"{moved:.1f}", f"{wait_s:.0f}", f"{stay_s:.0f}"))
            figures[f"{name} at {busy}"] = {"moved_tb": round(moved, 2), "wait_s": round(wait_s)}
        figures[f"ratio at {busy}"] = {"moved": round(both[1] / both[0], 3)}
    print(
        table(("GPUs asked for", "placement", "TB moved", "s to the first step", "s in all"), rows)
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
