"""What links cost: the head's CPU time when nothing happens, and memory on the head and on nodes.

Run with `python -m bench.link` (about five minutes and 10 GB; `--quick`: a tenth of it, for 15 s).
A real cluster is started. First real starters and agents join it, then a thousand links of which
only the node's book is real. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.figures import machine, table
from shoal.agent.dialling import read_link_file
from shoal.core.nodebook import NodeBook
from shoal.engines.linked.joining import prepare
from shoal.link.channel import dial
from shoal.link.wire import AsBefore, Ask, Heard, Link, ToAgent
from shoal.model.node import JOINED, NodeSpec
from shoal.model.report import Still

AGENTS, LINKS, MEASURE_S = 200, 1_000, 60.0
WAIT_S = 600.0
TICKS = os.sysconf("SC_CLK_TCK")
GOAL_PERCENT = 10.0  # of a core, with AGENTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the nodes, for 15 s")
    parser.add_argument("--simulate", nargs=2, metavar=("HOME", "COUNT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.simulate:
        asyncio.run(Crowd(Path(given.simulate[0]), int(given.simulate[1])).run())
        return
    print(machine(), flush=True)
    part = 10 if given.quick else 1
    scratch = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    try:
        with Head(scratch / "head") as head:
            figures = measure(head, scratch, part, 15.0 if given.quick else MEASURE_S)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    show(figures)
    print(json.dumps(figures))


def measure(head: Head, scratch: Path, part: int, seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {"empty_percent": head.percent(seconds)}
    before_mb = head.memory_mb()
    agents = AGENTS // part
    with starters(head, scratch / "agents", agents) as pids:
        head.wait_for(agents)
        figures["agents"] = agents
        figures["agents_percent"] = head.percent(seconds)
        figures["agents_head_kb_each"] = round((head.memory_mb() - before_mb) * 1000 / agents)
        kinds = ("starter", "keeper", "agent")
        for kind, of_kind in zip(kinds, zip(*pids(), strict=True), strict=True):
            figures[f"{kind}_mb"] = round(sum(map(proportional_mb, of_kind)) / len(of_kind), 1)
        figures["node_mb"] = round(sum(figures[f"{kind}_mb"] for kind in kinds), 1)
    head.wait_for(0)
    links = LINKS // part
    before_mb = head.memory_mb()
    with crowd(head, scratch / "links", links):
        head.wait_for(links)
        figures["links"] = links
        figures["links_percent"] = head.percent(seconds)
        figures["links_head_kb_each"] = round((head.memory_mb() - before_mb) * 1000 / links)
    return figures


class Head:
    """A cluster without nodes of its own, with TLS at its port."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __enter__(self) -> Head:
        self._shoal("up", "--nodes", "1", "--gpus", "0", "--host", "127.0.0.1", "--port", "0")
        # The port of a cluster on loopback alone has no TLS; the one with TLS is what we measure.
        self._shoal("down")
        path = self.home / "cluster.json"
        config = json.loads(path.read_text())
        config["host"] = "0.0.0.0"
        path.write_text(json.dumps(config))
        self._shoal("up")
        said = json.loads((self.home / "controller.json").read_text())
        self.pid, port = int(said["pid"]), said["url"].rpartition(":")[2]
        self.url = f"https://127.0.0.1:{port}"
        self.token = (self.home / "join-token").read_text().strip()
        return self

    def __exit__(self, *_: object) -> None:
        self._shoal("down")

    def _shoal(self, *words: str) -> str:
        command = [sys.executable, "-m", "shoal.main", *words]
        env = {**os.environ, "SHOAL_HOME": str(self.home)}
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"shoal {' '.join(words)}: {run.stderr or run.stdout}")
        return run.stdout

    def ready(self) -> int:
        nodes = json.loads(self._shoal("nodes", "--json"))
        return sum(1 for node in nodes if node["health"] == "ready" and node["id"] != "n1")

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while (found := self.ready()) != count:
            if time.monotonic() > deadline:
                raise SystemExit(f"only {found} of {count} nodes are ready")
            time.sleep(1.0)

    def percent(self, seconds: float) -> float:
        """Of a core, after a moment of rest."""
        time.sleep(min(15.0, seconds / 4))
        began, spent = time.monotonic(), cpu_s(self.pid)
        time.sleep(seconds)
        return round(100 * (cpu_s(self.pid) - spent) / (time.monotonic() - began), 2)

    def memory_mb(self) -> float:
        return proportional_mb(self.pid)


@contextlib.contextmanager
def starters(
    head: Head, home: Path, count: int
) -> Iterator[Callable[[], list[tuple[int, int, int]]]]:
    folders = [join(head, home, f"a{number}") for number in range(count)]
    running = []
    for folder in folders:
        command = [sys.executable, "-m", "shoal.agent.starter", str(folder), "--foreground"]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        time.sleep(0.05)

    def pids() -> list[tuple[int, int, int]]:
        said = [json.loads((folder / "agent.json").read_text()) for folder in folders]
        return [
            (starter.pid, one["keeper"], one["pid"])
            for starter, one in zip(running, said, strict=True)
        ]

    try:
        yield pids
    finally:
        for starter in running:
            starter.terminate()
        for starter in running:
            starter.wait(WAIT_S)


def join(head: Head, home: Path, name: str) -> Path:
    spec = NodeSpec(id=name, cpu_milli=8_000, memory_mb=8_000, gpus=0, origin=JOINED)
    return prepare(home, head.url, head.token, spec, patience_s=60.0)


@contextlib.contextmanager
def crowd(head: Head, home: Path, count: int) -> Iterator[None]:
    for number in range(count):
        join(head, home, f"s{number}")
    command = [sys.executable, "-m", "bench.link", "--simulate", str(home), str(count)]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


class Crowd:
    """Links of which each says what an agent at rest says."""

    def __init__(self, home: Path, count: int) -> None:
        self._folders = [home / "nodes" / f"s{number}" for number in range(count)]

    async def run(self) -> None:
        await asyncio.gather(*(self._live(folder) for folder in self._folders))

    async def _live(self, folder: Path) -> None:
        spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=NodeSpec)
        book, file = NodeBook(spec, int(time.time())), read_link_file(folder)
        links: list[Link] = []

        def received(message: ToAgent) -> None:
            if isinstance(message, Ask):
                links[-1].send(Heard(book.report()))

        def make() -> Link:
            links.append(Link(ToAgent, lambda _: None, received, lambda _: None, compress=True))
            return links[-1]

        await asyncio.sleep(random.uniform(0, 10))
        line = await dial(file.urls[0], file, make)
        beats = 0
        while not line.lost.done():
            said = book.heartbeat()
            links[-1].send(AsBefore(said) if isinstance(said, Still) else Heard(said))
            beats += 1
            if beats % 5 == 0 and line.channel is not None:
                line.channel.ping()
            await asyncio.sleep(1.0)
        raise SystemExit(f"{spec.id} has lost its link")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def proportional_mb(pid: int) -> float:
    """Its own memory, and its part of what it shares with others."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1000
    return 0.0


def show(figures: dict[str, Any]) -> None:
    rows = [
        ("head at rest without links", f"{figures['empty_percent']} % of a core"),
        (f"... with {figures['agents']} agents", f"{figures['agents_percent']} % of a core"),
        (f"... with {figures['links']} simulated", f"{figures['links_percent']} % of a core"),
        ("memory of the head per agent", f"{figures['agents_head_kb_each']} kB"),
        ("memory of the head per simulated link", f"{figures['links_head_kb_each']} kB"),
        ("memory of a node: starter", f"{figures['starter_mb']} MB"),
        ("... keeper", f"{figures['keeper_mb']} MB"),
        ("... agent", f"{figures['agent_mb']} MB"),
        ("... together (with Ray: 260 MB)", f"{figures['node_mb']} MB"),
    ]
    print(table(("", ""), rows))


if __name__ == "__main__":
    main()
