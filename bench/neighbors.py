"""Three clusters hand each other jobs over slow lines that are cut, while their heads are killed.

    python -m bench.neighbors                            two minutes
    python -m bench.neighbors --jobs 300 --cuts 30 --longest 60 --kills 30 --seconds 600

Real clusters on this machine, with TLS between them. Between each two is a line in user space: 5,
80 and 150 ms there and back. Each job writes a line when it begins and one when it is done, so what
ran, and how often, is counted by the jobs themselves. First, with nothing cut, what a hand-over
costs: from the submission to the first line of a job, here and over the line of 80 ms, in round
trips. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from harness.distance import Line, line
from harness.waiting import until

from bench.figures import machine
from shoal.client import Address, Client
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.model.identity import Role
from shoal.model.job import JobSpec
from shoal.model.neighbor_views import NewNeighbor
from shoal.model.node import NodeSpec
from shoal.model.people import NewToken

NAMES = ("a", "b", "c")
ROUND_TRIPS_S = {("a", "b"): 0.005, ("a", "c"): 0.080, ("b", "c"): 0.150}
GPUS = 2  # of each cluster, so that jobs wait and leave
KILLED = "b", "c", "a"
END_S = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.neighbors", description=__doc__)
    parser.add_argument("--jobs", type=int, default=60)
    parser.add_argument("--cuts", type=int, default=8)
    parser.add_argument("--longest", type=float, default=20.0, help="of the cuts, in seconds")
    parser.add_argument("--kills", type=int, default=6, help="of controllers")
    parser.add_argument("--seconds", type=float, default=90.0, help="in which all this happens")
    parser.add_argument("--handovers", type=int, default=10, help="to measure their cost")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    print(machine())
    with ExitStack() as stack:
        clusters = {name: stack.enter_context(_cluster()) for name in NAMES}
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-neighbors-", dir="/srv"))
        )
        folder.chmod(0o777)  # jobs of a neighbor are not of our user
        lines = _joined(stack, clusters)
        found: dict[str, Any] = {"handover": handover(clusters, folder, asked.handovers)}
        found["faults"] = faults(clusters, lines, folder, asked)
    print(json.dumps({"benchmark": "neighbors", **found}))
    return 0 if not found["faults"]["wrong"] else 1


class Site:
    """A cluster that is up."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.client = Client.at_home(home.path, patience_s=120)

    def run(self, script: str, **fields: Any) -> str:
        env = {"PATH": os.environ.get("PATH", os.defpath)}
        wanted = {"command": ("sh", "-c", script), "env": env, **fields}
        return self.client.submit(msgspec.convert(wanted, JobSpec)).id

    def wait(self, job: str, timeout_s: float = END_S) -> str:
        """Its state when it has ended."""
        deadline = time.monotonic() + timeout_s
        while (view := self.client.job(job, wait_for="finished", wait_s=10)).finished_ms is None:
            assert time.monotonic() < deadline, f"{job} is {view.state}: {view.why}"
        return view.state

    def kill_controller(self) -> None:
        address = msgspec.json.decode(self.home.address.read_bytes(), type=Address)
        with contextlib.suppress(ProcessLookupError):
            os.kill(address.pid, signal.SIGKILL)


@contextlib.contextmanager
def _cluster() -> Iterator[Site]:
    node = NodeSpec(id="n1", gpus=GPUS, cpu_milli=16_000, memory_mb=4_000)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as path:
        home = Home(Path(path))
        bring_up(home, ClusterConfig(nodes=(node,), host="0.0.0.0", port=0), lambda _: None)
        try:
            site = Site(home)
            yield site
            site.client.close()
        finally:
            take_down(home, lambda _: None)


def _joined(stack: ExitStack, clusters: dict[str, Site]) -> dict[tuple[str, str], Line]:
    """Each knows both others, by lines of their own for each direction."""
    lines: dict[tuple[str, str], Line] = {}
    for host in NAMES:
        client = clusters[host].client
        address = msgspec.json.decode(clusters[host].home.address.read_bytes(), type=Address)
        port = int(address.url.rpartition(":")[2])
        for home in NAMES:
            if home == host:
                continue
            client.add_tenant(home)
            client.add_user(home, {home: Role.MEMBER})
            token = client.add_token(
                NewToken(user=home, tenant=home, role=Role.MEMBER, only="neighbor")
            )
            first, second = sorted((home, host))
            one_way_s = ROUND_TRIPS_S[first, second] / 2
            lines[home, host] = stack.enter_context(line(("127.0.0.1", port), one_way_s))
            url = f"https://127.0.0.1:{lines[home, host].address[1]}"
            secret = f"{token.secret}.{address.fingerprint.removeprefix('sha256:')}"
            clusters[home].client.set_neighbor(host, NewNeighbor(url=url, token=secret))
    return lines


def handover(clusters: dict[str, Site], folder: Path, count: int) -> dict[str, float]:
    """From the submission to the job's first line, one job after the other."""
    home, far_s = clusters["a"], ROUND_TRIPS_S["a", "c"]
    took: dict[str, list[float]] = {"": [], "c": []}
    for number in range(count):
        for cluster, times in took.items():
            place = folder / f"h{number}{cluster}"
            began = time.time()
            job = home.run(f"date +%s.%N > {place}", cluster=cluster)
            assert home.wait(job) == "succeeded", home.client.job(job).why
            times.append(float(place.read_text()) - began)
    here, there = (statistics.median(times) for times in took.values())
    print(f"a job runs here after {here * 1000:.0f} ms, at c ({far_s * 1000:.0f} ms away) after")
    print(f"{there * 1000:.0f} ms: {(there - here) / far_s:.1f} round trips more")
    return {
        "here_ms": round(here * 1000, 1),
        "there_ms": round(there * 1000, 1),
        "round_trips": round((there - here) / far_s, 2),
    }


def faults(
    clusters: dict[str, Site],
    lines: dict[tuple[str, str], Line],
    folder: Path,
    asked: argparse.Namespace,
) -> dict[str, Any]:
    rng = random.Random(asked.seed)
    over = threading.Event()
    counts: Counter[str] = Counter()
    threads = [
        threading.Thread(
            target=_cuts,
            args=(
                rng.randrange(1 << 30),
                (lines[first, second], lines[second, first]),
                asked,
                over,
                counts,
            ),
        )
        for first, second in ROUND_TRIPS_S
    ]
    kills = (rng.randrange(1 << 30), clusters, asked, over, counts)
    threads.append(threading.Thread(target=_kills, args=kills))
    for thread in threads:
        thread.start()
    jobs: dict[str, tuple[str, str]] = {}  # mark -> where it was submitted, its id there
    began = time.monotonic()
    for number in range(asked.jobs):
        home = rng.choice(NAMES)
        others = [name for name in NAMES if name != home]
        wish = rng.choice(("any", "any", others[0], others[1], ",".join(others)))
        mark, sleep_s = f"m{number}", rng.uniform(0.1, 3)
        script = f"echo begin >> {folder}/{mark}; sleep {sleep_s:.2f}; echo done >> {folder}/{mark}"
        jobs[mark] = home, clusters[home].run(script, gpus=1, cluster=wish)
        left_s = began + asked.seconds * (number + 1) / asked.jobs - time.monotonic()
        time.sleep(max(0.0, left_s))
    over.set()
    for thread in threads:
        thread.join()
    for one in lines.values():
        one.mend()
    return _judged(clusters, folder, jobs, counts)


def _cuts(
    seed: int,
    cut: tuple[Line, Line],
    asked: argparse.Namespace,
    over: threading.Event,
    counts: Counter[str],
) -> None:
    """Of one pair, both directions at once."""
    rng = random.Random(seed)
    number = asked.cuts // len(ROUND_TRIPS_S)
    lasts_s = [rng.uniform(2, asked.longest) for _ in range(number)]
    whole_s = max(0.0, asked.seconds - sum(lasts_s)) / max(1, number)
    for last_s in lasts_s:
        if over.wait(whole_s):
            return
        for one in cut:
            one.cut()
        counts["cuts"] += 1
        over.wait(last_s)
        for one in cut:
            one.mend()


def _kills(
    seed: int,
    clusters: dict[str, Site],
    asked: argparse.Namespace,
    over: threading.Event,
    counts: Counter[str],
) -> None:
    rng = random.Random(seed)
    for number in range(asked.kills):
        if over.wait(rng.uniform(0.5, 1.5) * asked.seconds / asked.kills):
            return
        clusters[KILLED[number % 3]].kill_controller()
        counts["kills"] += 1


def _judged(
    clusters: dict[str, Site], folder: Path, jobs: dict[str, tuple[str, str]], counts: Counter[str]
) -> dict[str, Any]:
    wrong: list[str] = []
    moved = 0
    for mark, (home, job) in jobs.items():
        client = clusters[home].client
        state = clusters[home].wait(job, timeout_s=END_S)
        text = (folder / mark).read_text() if (folder / mark).exists() else ""
        if state != "succeeded" or text != "begin\ndone\n":
            wrong.append(f"{home}/{job} is {state} and wrote {text.split()}")
        moved += any("handed over" in one.text for one in client.events(job=job).events)
    until(lambda: not any(_held(clusters[name]) for name in NAMES), "something is still away")
    print(f"{len(jobs)} jobs, {moved} of them handed over, {counts['cuts']} cuts,", end=" ")
    print(f"{counts['kills']} kills of controllers: {len(wrong)} wrong", *wrong[:10], sep="\n  ")
    return {"jobs": len(jobs), "moved": moved, **counts, "wrong": len(wrong)}


def _held(cluster: Site) -> int:
    return sum(len(view.jobs) for view in cluster.client.neighbors())


if __name__ == "__main__":
    sys.exit(main())
