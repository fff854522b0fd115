"""What the ledger costs: events booked per second, bytes kept per job, time of a report.

    python bench/ledger.py [--nodes 2000] [--jobs 50000]

Synthetic jobs (seeded) on nodes of 8 GPUs over some days; CPU time. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.figures import machine, table
from shoal.core.state.events.log import Event
from shoal.core.state.events.nodes import NodeJoined, NodeReady
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import JobFinished, JobPlaced, JobRunning, MemberExited
from shoal.ledger.accounts import HOUR_MS
from shoal.ledger.book import Book
from shoal.ledger.report import Tariff, view
from shoal.ledger.store import LedgerStore
from shoal.model.job import JobSpec, MemberRef, Outcome
from shoal.model.ledger import By, PriceList
from shoal.model.node import NodeSpec
from shoal.model.progress import Beat, Progress
from shoal.model.resources import Slice

GPUS = 8
EVENTS_PER_WRITE = 5_000


def history(nodes: int, jobs: int) -> Iterator[Event]:
    """One-GPU jobs that run for about half an hour; all GPUs are in use."""
    rng = random.Random(1)
    free = [(f"n{n}", gpu) for n in range(nodes) for gpu in range(GPUS)]
    for number in range(nodes):
        spec = NodeSpec(
            id=f"n{number}", gpus=GPUS, cpu_milli=64_000, memory_mb=500_000, gpu_model="H100"
        )
        yield NodeJoined(at_ms=0, node=spec.id, spec=spec, incarnation=1)
        yield NodeReady(at_ms=0, node=spec.id)
    ends: list[tuple[int, str, str, int]] = []
    now_ms = 0
    for number in range(jobs):
        if not free:
            now_ms, job, node, gpu = heapq.heappop(ends)
            yield from over(now_ms, job, node)
            free.append((node, gpu))
        job, (node, gpu) = f"j{number}", free.pop()
        spec_ = JobSpec(command=("x",), gpus=1, tenant=f"t{number % 20}", user=f"u{number % 100}")
        yield JobSubmitted(at_ms=now_ms, job=job, spec=spec_)
        slices = (Slice(node, (gpu,)),)
        yield JobPlaced(at_ms=now_ms, job=job, attempt=1, slices=slices, master="", why="")
        yield JobRunning(at_ms=now_ms + 1, job=job, attempt=1)
        heapq.heappush(ends, (now_ms + int(rng.expovariate(1 / 1_800_000)), job, node, gpu))
    while ends:
        now_ms, job, node, _ = heapq.heappop(ends)
        yield from over(now_ms, job, node)


def over(at_ms: int, job: str, node: str) -> Iterator[Event]:
    yield MemberExited(at_ms=at_ms, job=job, attempt=1, member=0, node=node, code=0)
    done = Outcome.SUCCEEDED
    yield JobFinished(at_ms=at_ms, job=job, attempt=1, outcome=done, code=0, why="")


def measure(nodes: int, jobs: int) -> dict[str, float]:
    events = sorted(history(nodes, jobs), key=lambda event: event.at_ms)
    book = Book()
    written, writing = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        store = LedgerStore(path)
        began = time.process_time()
        for seq, event in enumerate(events, 1):
            book.take(event)
            if seq % EVENTS_PER_WRITE == 0:
                at = time.process_time()
                book.settle()
                store.put(book.drain(), msgspec.msgpack.encode(book.cluster), seq)
                writing += time.process_time() - at
                written += 1
        booked_s = time.process_time() - began - writing
        state_bytes = len(msgspec.msgpack.encode(book.cluster))
        store.put(book.drain(), msgspec.msgpack.encode(book.cluster), len(events))
        hours = book.cluster.now_ms // HOUR_MS + 1
        at = time.perf_counter()
        tariff = Tariff(PriceList(), store.machines())
        sums = store.sums(By.TENANT, 0, hours, tariff.of_machine)
        capacity = store.capacity(0, hours)
        told = view(
            tariff,
            sums,
            by=By.TENANT,
            from_ms=0,
            to_ms=hours * HOUR_MS,
            began_ms=0,
            capacity=capacity,
            gpus=nodes * GPUS,
            keys_max=1000,
            notes=[],
            nap=store.naps(0, hours),
        )
        report_s = time.perf_counter() - at
        assert sum(row.gpu_us for row in told.rows) == capacity, "the accounts do not balance"
        store.close()
        size = path.stat().st_size
    return {
        "events": len(events),
        "hours": hours,
        "events_per_s": round(len(events) / booked_s),
        "write_ms": round(writing * 1000 / max(1, written), 1),
        "bytes_per_job": round(size / jobs),
        "memory_bytes_after": state_bytes,
        "report_ms": round(report_s * 1000, 1),
        "beats_per_s": round(beats_per_s()),
    }


def beats_per_s(members: int = 1000, rounds: int = 100) -> float:
    """A gang that sends a beat for each member every second."""
    book = Book()
    spec = NodeSpec(id="n", gpus=256, cpu_milli=1, memory_mb=1)
    book.take(NodeJoined(at_ms=0, node="n", spec=spec, incarnation=1))
    job = JobSpec(command=("x",), gpus=1, gpu_milli=100, members=members)
    book.take(JobSubmitted(at_ms=0, job="j", spec=job))
    slices = tuple(Slice("n", (number % 256,), gpu_milli=100) for number in range(members))
    book.take(JobPlaced(at_ms=0, job="j", attempt=1, slices=slices, master="", why=""))
    book.take(JobRunning(at_ms=0, job="j", attempt=1))
    began = time.process_time()
    for second in range(1, rounds + 1):
        book.advance(second * 1000)
        book.hear(
            Progress(
                MemberRef("j", 1, number),
                Beat(
                    ref="",
                    step=second,
                    steps=second,
                    compute_us=second * 900_000,
                    wait_us=second * 100_000,
                ),
                0,
            )
            for number in range(members)
        )
    return members * rounds / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2_000)
    parser.add_argument("--jobs", type=int, default=50_000)
    given = parser.parse_args()
    found = measure(given.nodes, given.jobs)
    print(machine())
    print(table(["figure", "value"], found.items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
