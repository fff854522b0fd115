"""How a controller carries 50,000 jobs of 200 clients: time of a submission, memory, recovery.

python -m bench.load [--jobs 50000] [--clients 200] [--rate R] [--heads 1|2]

One head keeps them in SQLite; two keep them in a real PostgreSQL, and clients send to both. Clients
are in a few processes of their own, with connections that stay open and no pause, unless `--rate`
sets how many submissions they send in a second together. All jobs wait, because the only node is
full. Then controllers are killed: measured is the time until the next submission is accepted.
Goals: 2,000 submissions a second, p99 < 250 ms, 120 MB, back in < 2 s. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from urllib.parse import urlsplit

import msgspec
from harness.clusters import Head, Measured, one_head, two_heads

from bench.figures import machine, percentile, table
from shoal.model.job import JobSpec
from shoal.model.views import Submission

PROCESSES = 4
KILLS = 5
GOAL_PER_S, GOAL_P99_MS, GOAL_MB, GOAL_BACK_S = 2_000, 250.0, 120.0, 2.0
BUSY = (429, 503)
WAITS = JobSpec(command=("true",), gpus=8, env={"PATH": os.environ.get("PATH", os.defpath)})


class Place(msgspec.Struct, frozen=True):
    host: str
    port: int
    token: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--jobs", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rate", type=float, default=0, help="submissions a second, in all")
    parser.add_argument("--heads", type=int, choices=(1, 2), default=1)
    parser.add_argument("--profile", action="store_true", help="py-spy of the leader, to load.raw")
    asked = parser.parse_args()
    print(machine(), file=sys.stderr)
    with one_head() if asked.heads == 1 else two_heads() as cluster:
        cluster.client.submit(msgspec.structs.replace(WAITS, command=("sleep", "86400")))
        leader = cluster.leader()
        before_mb, before_s = memory_mb(leader.controller()), cpu_s(leader.controller())
        spy = profiled(leader.controller()) if asked.profile else None
        began = time.monotonic()
        places = [place_of(head) for head in cluster.heads]
        times_ns, refused = flood(places, asked.jobs, asked.clients, asked.rate)
        seconds = time.monotonic() - began
        if spy is not None:
            os.kill(spy, signal.SIGINT)
        after_mb = memory_mb(leader.controller())
        busy_s = cpu_s(leader.controller()) - before_s
        waiting = cluster.client.status().jobs.get("waiting", 0)
        back = [recovery(cluster.leader(), cluster) for _ in range(KILLS)]
        kept = cluster.client.status().jobs.get("waiting", 0)
    figures = {
        "machine": machine(),
        "heads": asked.heads,
        "jobs": asked.jobs,
        "clients": asked.clients,
        "rate": asked.rate,
        "per_s": round(len(times_ns) / seconds),
        "p50_ms": round(percentile(times_ns, 50) / 1e6, 1),
        "p99_ms": round(percentile(times_ns, 99) / 1e6, 1),
        "max_ms": round(max(times_ns) / 1e6, 1),
        "cpu_ms": round(busy_s / len(times_ns) * 1000, 3),
        "told_to_wait": refused,
        "memory_mb": [before_mb, after_mb],
        "back_s": [round(seconds, 2) for seconds, _ in back],
        "back_cpu_s": [round(seconds, 2) for _, seconds in back],
        "waiting": waiting,
        "lost": asked.jobs + KILLS - kept,
        "goals": {
            "per_s": len(times_ns) / seconds >= GOAL_PER_S,
            "p99": percentile(times_ns, 99) / 1e6 < GOAL_P99_MS,
            "memory": after_mb < GOAL_MB,
            "back": max(seconds for seconds, _ in back) < GOAL_BACK_S,
            "back_cpu": max(seconds for _, seconds in back) < GOAL_BACK_S,
        },
    }
    print(table(["what", "figure"], [[name, value] for name, value in figures.items()]))
    print(msgspec.json.encode(figures).decode())
    return 0 if figures["lost"] == 0 else 1


def place_of(head: Head) -> Place:
    url = urlsplit(head.address().url)
    return Place(url.hostname or "", url.port or 80, head.token())


# -- clients -------------------------------------------------------------------------------


def flood(places: Sequence[Place], jobs: int, clients: int, rate: float) -> tuple[list[int], int]:
    """The time of each submission, and how many answers said "later"."""
    spawn = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[list[int], int]] = spawn.Queue()
    each = clients // PROCESSES
    workers = [
        spawn.Process(
            target=_work,
            args=(list(places), number, each, jobs // PROCESSES, rate / PROCESSES, results),
        )
        for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    times_ns: list[int] = []
    refused = 0
    for _ in workers:
        while True:
            try:
                own, later = results.get(timeout=5)
                break
            except Empty:
                dead = [worker for worker in workers if worker.exitcode]
                if dead:
                    raise SystemExit("a process of clients has died") from None
        times_ns += own
        refused += later
    for worker in workers:
        worker.join()
    return times_ns, refused


def _work(
    places: list[Place],
    number: int,
    clients: int,
    jobs: int,
    rate: float,
    results: multiprocessing.Queue[tuple[list[int], int]],
) -> None:
    results.put(asyncio.run(_clients(places, number, clients, jobs, rate)))


async def _clients(
    places: list[Place], number: int, clients: int, jobs: int, rate: float
) -> tuple[list[int], int]:
    times: list[int] = []
    later = [0]
    left = iter(range(jobs))
    began = time.monotonic()

    async def client(place: Place) -> None:
        reader, writer = await asyncio.open_connection(place.host, place.port)
        for one in left:
            if rate and (wait_s := began + one / rate - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            body = msgspec.json.encode(Submission(spec=WAITS, key=f"load-{number}-{one}"))
            started = time.perf_counter_ns()
            while (status := await _post(place, reader, writer, body)) in BUSY:
                later[0] += 1
                await asyncio.sleep(0.1)
            if status >= 300:
                raise SystemExit(f"a submission was answered with {status}")
            times.append(time.perf_counter_ns() - started)
        writer.close()

    await asyncio.gather(*[client(places[one % len(places)]) for one in range(clients)])
    return times, later[0]


async def _post(
    place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes
) -> int:
    writer.write(
        b"POST /v1/jobs HTTP/1.1\r\nHost: %s:%d\r\nAuthorization: Bearer %s\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (place.host.encode(), place.port, place.token.encode(), len(body), body)
    )
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    length = next(line for line in lines if line.lower().startswith(b"content-length:"))
    await reader.readexactly(int(length.split(b":")[1]))
    return int(lines[0].split()[1])


# -- the controller ------------------------------------------------------------------------


def memory_mb(pid: int) -> float:
    """Resident, with shared pages divided."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


def cpu_s(pid: int) -> float:
    """Processor time that it has used, which other load on the machine hardly changes."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def recovery(leader: Head, cluster: Measured) -> tuple[float, float]:
    """From the kill until the next submission is accepted, and the processor time that the next
    leader has used by then."""
    began = time.monotonic()
    os.kill(leader.controller(), signal.SIGKILL)
    cluster.client.lent(patience_s=120).submit(WAITS)
    return time.monotonic() - began, cpu_s(cluster.leader().controller())


def profiled(pid: int) -> int:
    spy = str(Path(sys.executable).with_name("py-spy"))
    words = (spy, "record", "--pid", str(pid), "--rate", "50", "--format", "raw", "-o", "load.raw")
    return os.posix_spawn(spy, words, os.environ)


if __name__ == "__main__":
    sys.exit(main())
