"""Sleep and wake: what it costs to lend a GPU, beside the other ways to do it.

Run with `python -m bench.sleep` on a machine with an NVIDIA GPU, torch with CUDA and
`nvidia-ml-py`, or with `--virtual` anywhere: then GPUs are numbers, members are frozen, and the
figures show only what Shoal itself takes. `--parts` picks from `lend,serve,refuse,turns`. Each part
prints its figures when it has them; the last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.figures import machine, ratio, table
from bench.gateway_peers import free_port
from bench.sleep_cluster import Cluster, Job, Mark

Figures = dict[str, Any]

KNOWN_S = 3.5  # an agent looks at its GPUs every two seconds, and reports every second


class Size(NamedTuple):
    """How much each part does. Memory is what the job has on its GPU beside CUDA's own."""

    step_s: float
    train_mb: int
    take_mb: int
    take_s: float
    save_every: int
    weights_mb: int
    turn_mb: int
    turn_s: float
    turns_s: float
    turn_percent: int
    share_mb: int


GPU = Size(0.02, 8_000, 120_000, 3.0, 100, 4_000, 300, 15.0, 60.0, 5, 500)
VIRTUAL = Size(0.01, 1, 1, 0.3, 30, 8, 1, 0.5, 4.0, 50, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--parts", default="lend,serve,refuse,turns")
    asked = parser.parse_args()
    print(machine(), flush=True)
    size = VIRTUAL if asked.virtual else GPU
    found: Figures = {"machine": machine(), "virtual": asked.virtual}
    failed = False
    with Cluster(virtual=asked.virtual) as cluster:
        for part in asked.parts.split(","):
            began = time.monotonic()
            try:
                found[part] = PARTS[part](cluster, size)
            except Exception:  # the time on a GPU is short: the other parts still count
                found[part], failed = {"failed": traceback.format_exc()[-1_500:]}, True
                print(traceback.format_exc(), cluster.log(), sep="\n", file=sys.stderr)
            found[part]["took_s"] = round(time.monotonic() - began, 1)
            print(part, msgspec.json.encode(found[part]).decode(), flush=True)
            clear(cluster)
    if not failed:
        report(found)
    print(msgspec.json.encode(found).decode())
    sys.exit(failed)


def clear(cluster: Cluster) -> None:
    """A part that failed may have left jobs."""
    for row in cluster.client.jobs():
        cluster.client.cancel(row.id)


def lend(cluster: Cluster, size: Size) -> Figures:
    """A training script is interrupted by a job that needs the whole GPU."""
    saves = cluster.directory / "saves"
    saves.mkdir()
    plain = (size.step_s, size.train_mb)
    asleep = interrupted(cluster, cluster.run("train", *plain), size)
    job = cluster.run("train", *plain, saves, size.save_every, no_sleep=True)
    return {"asleep": asleep, "stopped": interrupted(cluster, job, size)}


def interrupted(cluster: Cluster, job: Job, size: Size) -> Figures:
    job.stepped(size.save_every + size.save_every // 2)
    wait_known(cluster, job)
    urgent = cluster.run("take", size.take_s, size.take_mb, priority=10, preemptible=False)
    begun, holds, ends = (urgent.seen(what) for what in ("begin", "holds", "ends"))
    before = [mark for mark in job.steps() if mark.at < begun.at]
    last = max(int(mark.what) for mark in before)
    job.reached(last + 5)
    after = [mark for mark in job.steps() if mark.at >= begun.at]
    lost = sum(int(mark.what) <= last for mark in after)
    new = next(mark for mark in after if int(mark.what) > last)
    figures = {
        "steps_lost": lost,
        "steps_skipped": int(new.what) - last - 1,
        "same_process": after[0].pid == before[-1].pid,
        "lend_s": round(begun.at - urgent.submitted, 2),
        "holds_all_s": round(holds.at - urgent.submitted, 2),
        "return_s": round(new.at - ends.at, 2),
        "mb_held_by_other": size.take_mb,
        **cluster.sleeps(job),
    }
    (cluster.directory / "look").touch()  # it looks whether its memory is as it was
    job.stepped(2, since=time.time())
    (cluster.directory / "look").unlink()
    figures["sound"] = not any(mark.what == "broken" for mark in job.marks())
    job.end()
    return figures


def wait_known(cluster: Cluster, job: Job) -> None:
    """Until the node has reported what the job has on its GPU: before, it is taken to have all."""
    if not cluster.virtual:
        job.stepped(1, since=time.time() + KNOWN_S)


def serve(cluster: Cluster, size: Size) -> Figures:
    """From a request until its answer: of a server that starts, that starts warm, that sleeps."""
    weights = cluster.directory / "weights"
    write_weights(weights, size.weights_mb, virtual=cluster.virtual)
    port = free_port()
    found: Figures = {"weights_mb": size.weights_mb}
    for kind in ("cold", "first", "warm"):  # after the first, an interpreter is kept warm for it
        server = cluster.run("serve", port, weights, cold=kind == "cold")
        server.seen("ready")
        text = answer(port)
        found[f"{kind}_s"] = round(time.time() - server.submitted, 2)
        if kind == "first":
            cluster.wait_until_warm(server)
        if kind != "warm":
            server.end()
    at = time.time()
    while time.time() < at + (0 if cluster.virtual else KNOWN_S):
        assert answer(port) == text
    at = time.time()
    assert answer(port) == text
    found["awake_s"] = round(time.time() - at, 3)
    cluster.client.sleep(server.id)
    server.until("asleep")
    at = time.time()
    cluster.client.wake(server.id)
    assert answer(port) == text, "another answer than before it slept"
    found["woken_s"] = round(time.time() - at, 2)
    server.until("running")
    found |= cluster.sleeps(server)
    server.end()
    return found


def answer(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=90) as reply:
        return bytes(reply.read())


def write_weights(file: Path, mb: int, *, virtual: bool) -> None:
    if virtual:
        file.write_bytes(bytes(mb << 20))
        return
    import numpy

    piece = numpy.random.default_rng(0).integers(0, 1 << 14, 32 << 20, dtype=numpy.uint16).tobytes()
    with file.open("wb") as out:
        for _ in range(mb >> 6):
            out.write(piece)


def turns(cluster: Cluster, size: Size) -> Figures:
    """Two jobs of the same priority and one GPU: steps of both, against those of one alone."""
    cluster.policy(turn_cost_percent=size.turn_percent, turn_ms_min=int(size.turn_s * 1000))
    first = cluster.run("train", size.step_s, size.turn_mb)
    first.seen("ready")
    other = cluster.run("train", size.step_s, size.turn_mb)
    began = other.seen("ready").at
    rate = rate_of([mark for mark in first.steps() if mark.at < other.seen("begin").at])
    time.sleep(size.turns_s)
    ended = time.time()
    jobs = (first, other)
    steps = [[mark for mark in job.steps() if began <= mark.at < ended] for job in jobs]
    together = sum(map(len, steps)) / (ended - began)
    figures = {
        "alone_steps_s": round(rate, 2),
        "together_steps_s": round(together, 2),
        "ratio": round(together / rate, 3),
        "share_of_first": round(len(steps[0]) / max(1, sum(map(len, steps))), 2),
        "changes": changes(steps),
        "seconds": size.turns_s,
        **cluster.sleeps(first),
    }
    for job in jobs:
        job.end()
    cluster.policy()
    return figures


def rate_of(marks: list[Mark]) -> float:
    """Steps per second without the first ones, in which clocks rise and memory is found."""
    steady = marks[len(marks) // 4 :]
    return (len(steady) - 1) / (steady[-1].at - steady[0].at)


def changes(steps: list[list[Mark]]) -> int:
    """How often the GPU went from one job to the other."""
    order = sorted((mark.at, number) for number, marks in enumerate(steps) for mark in marks)
    return sum(one[1] != two[1] for one, two in itertools.pairwise(order))


def refuse(cluster: Cluster, size: Size) -> Figures:
    """A job of two processes that share memory of the GPU is asked to sleep."""
    job = cluster.run("share", size.step_s, size.share_mb)
    job.stepped(5)
    wait_known(cluster, job)
    cluster.client.sleep(job.id)
    job.until("asleep", "running")
    state, why = job.phase(), job.why()
    if state == "asleep":
        cluster.client.wake(job.id)
    job.until("running")
    job.stepped(10, since=time.time())
    steps = job.steps()
    figures = {
        "slept": state == "asleep",
        "why": why,
        "steps_lost": len(steps) - len({mark.what for mark in steps}),
        "lives": len({mark.pid for mark in steps}) == 1,
    }
    job.end()
    return figures


def report(found: Figures) -> None:
    if "lend" in found:
        names = ("lend_s", "holds_all_s", "return_s", "steps_lost")
        rows = [
            (kind, *(found["lend"][kind][name] for name in names)) for kind in ("asleep", "stopped")
        ]
        header = ("the first job is", "lent after s", "all of it s", "back after s", "steps lost")
        print(table(header, rows))
    if "serve" in found:
        took = {kind: found["serve"][f"{kind}_s"] for kind in ("cold", "warm", "woken")}
        times = [(kind, s, ratio(s, took["woken"])) for kind, s in took.items()]
        print(table(("a server's first answer", "s", "ratio to woken"), times))
    if "turns" in found:
        print(f"two jobs in turns: {found['turns']['ratio']} of the steps of one after the other")
    if "refuse" in found:
        one = found["refuse"]
        print(f"memory of the GPU shared by processes: {'slept' if one['slept'] else one['why']}")


PARTS: dict[str, Callable[[Cluster, Size], Figures]] = {
    "lend": lend,
    "serve": serve,
    "turns": turns,
    "refuse": refuse,
}

if __name__ == "__main__":
    main()
