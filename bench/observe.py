"""What observation costs: reports for the controller, bytes kept, time in the training loop.

Run with `python -m bench.observe` (about two minutes; `--quick`: a tenth of the cluster, nothing
live). CPU time of one thread is counted, so that other work on the machine matters little. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from bench.cluster import GPUS_PER_NODE, Cluster, job_spec
from bench.figures import machine, table
from shoal.api.metrics import collect
from shoal.control.counters import Counters
from shoal.control.history.history import History
from shoal.control.history.jobs import JobHistory
from shoal.control.loop import ControlLoop
from shoal.core.nodebook import NodeBook
from shoal.link.wire import FromAgent, Heard
from shoal.model.progress import Beat, Progress
from shoal.model.report import Report
from shoal.model.series import GpuSample, NodeSample

NODES = 2000
GANG_NODES = 8  # a gang of 64 members
ROUNDS = 12
WARM_ROUNDS = 2
STEPS_PER_S = 10
LIVE_S = 15.0
HOUR_MS = 3_600_000
LOOP_STEPS = 20_000
TURNS = 5
GOAL_PERCENT = 0.5
STEP_MS = 10.0  # a short step, which pays the most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the cluster, nothing live")
    quick = parser.parse_args().quick
    print(machine(), flush=True)
    crowd = Crowd(NODES // 10 if quick else NODES)
    figures: dict[str, Any] = {
        "nodes": crowd.nodes,
        "members": len(crowd.beats),
        "reports": measure_reports(crowd),
        "metrics": measure_metrics(crowd),
        "kept": measure_kept(),
    }
    if not quick:
        figures["loop"] = measure_loop()
        figures["live"] = measure_live()
    report(figures)
    print(json.dumps(figures))


class Crowd:
    """A full cluster whose members all report their steps, and a history that samples it."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.cluster = Cluster(nodes)
        spec = job_spec(GANG_NODES * GPUS_PER_NODE, 1, 8)
        self.cluster.submit([spec] * (nodes // GANG_NODES))
        self.now_ms = self.cluster.now_ms
        self.beats = {
            ref: Beat(ref=str(ref)) for book in self.cluster.books.values() for ref in book.alive
        }
        self.loop = SimpleNamespace(
            state=self.cluster.state,
            counters=Counters(),
            started_ms=0,
            waiting=0,
            finishing={},
            samples={},
            clock=SimpleNamespace(now_ms=lambda: self.now_ms),
        )
        self.history = History(cast(ControlLoop, self.loop))

    def second(self) -> list[bytes]:
        """All members do some steps; returns the frames that their agents send."""
        self.now_ms = self.cluster.now_ms = self.cluster.now_ms + 1000
        for ref, beat in self.beats.items():
            self.beats[ref] = stepped(beat, STEPS_PER_S)
        return [self._frame(book) for book in self.cluster.books.values()]

    def _frame(self, book: NodeBook) -> bytes:
        told = tuple(Progress(ref, self.beats[ref], 50) for ref in book.alive)
        heard = Heard(book.report(told, sample(self.now_ms)))
        return msgspec.msgpack.encode(heard)


def stepped(beat: Beat, steps: int) -> Beat:
    return msgspec.structs.replace(
        beat,
        step=beat.step + steps,
        steps=beat.steps + steps,
        compute_us=beat.compute_us + steps * 80_000,
        wait_us=beat.wait_us + steps * 20_000,
        loss=10 / (1 + beat.step),
        metrics={"lr": 0.001, "tokens_per_s": 12_345.6},
    )


def sample(now_ms: int) -> NodeSample:
    gpu = GpuSample(busy_milli=930, memory_milli=700, power_w=650, temperature_c=66)
    return NodeSample(at_ms=now_ms, cpu_milli=300, memory_milli=400, gpus=(gpu,) * GPUS_PER_NODE)


def measure_reports(crowd: Crowd) -> dict[str, float]:
    """One second of the whole cluster at a time: read the frames, one step, one look."""
    decode = msgspec.msgpack.Decoder(FromAgent).decode
    parts: dict[str, list[float]] = {"decode": [], "step": [], "look": []}
    longest: list[float] = []
    for number in range(ROUNDS):
        frames = crowd.second()
        read, decode_s = timed(partial(list, map(decode, frames)))
        reports = tuple(one.report for one in read)
        crowd.loop.samples = {one.spec.id: one.sample for one in reports}
        crowd.cluster.step(Report(nodes=reports))
        pauses = [took_s for _, took_s in pieces(crowd.history.looks())]
        look_s = sum(pauses)
        if number >= WARM_ROUNDS:
            parts["decode"].append(decode_s)
            parts["step"].append(crowd.cluster.elapsed_ns / 1e9)
            parts["look"].append(look_s)
            longest.append(max(pauses))
    medians = {f"{name}_ms": statistics.median(times) * 1e3 for name, times in parts.items()}
    whole_s = sum(medians.values()) / 1e3
    medians["longest_piece_ms"] = statistics.median(longest) * 1e3
    medians["beats_per_s"] = len(crowd.beats) / whole_s
    medians["node_reports_per_s"] = crowd.nodes / whole_s
    medians["share_of_a_core_percent"] = 100 * whole_s  # with a report of each node every second
    return {name: round(value, 1) for name, value in medians.items()}


def measure_metrics(crowd: Crowd) -> dict[str, float]:
    loop, history = cast(ControlLoop, crowd.loop), crowd.history
    runs = [list(pieces(collect(loop, history))) for _ in range(TURNS)]
    text = "".join(part for part, _ in runs[0])
    return {
        "whole_ms": round(statistics.median(sum(t for _, t in run) for run in runs) * 1e3, 1),
        "longest_pause_ms": round(max(took for run in runs for _, took in run) * 1e3, 1),
        "bytes": len(text),
        "samples": sum(not line.startswith("#") for line in text.splitlines()),
    }


def measure_kept() -> dict[str, Any]:
    """The bytes stored for one job, and per hour of its life."""
    kept: dict[str, Any] = {}
    for members, hours in itertools.product((1, 8, 64), (1, 24, 720)):
        size = stored_bytes(members, hours)
        kept[f"{members} members, {hours} h"] = {
            "bytes": size,
            "bytes_per_job_hour": round(size / hours),
        }
    return kept


def stored_bytes(members: int, hours: int) -> int:
    history = JobHistory("j1")
    beats = {number: Beat(ref="x") for number in range(members)}
    nodes = [f"node-{number // GPUS_PER_NODE}" for number in range(members)]
    chance = random.Random(1)  # curves of real jobs are not smooth, and compress badly
    now_ms = told_ms = 0
    while now_ms < hours * HOUR_MS:
        now_ms += 1000
        if not history.due(now_ms):
            continue
        steps = STEPS_PER_S * (now_ms - told_ms) // 1000
        for number, beat in beats.items():
            waited_us = steps * (20_000 + chance.randrange(5_000))
            beats[number] = msgspec.structs.replace(
                stepped(beat, steps), wait_us=beat.wait_us + waited_us, loss=chance.random()
            )
        told_ms = now_ms
        found = history.sample(1, nodes, beats, now_ms)
        if found is not None:
            history.take(found)
    return len(zlib.compress(history.body(), 1))


def measure_loop() -> dict[str, float]:
    """The cost of reporting a step in microseconds: as bench/overhead.py, without a save."""
    script = (
        "import itertools, sys, time\n"
        "from bench.overhead import listen\n"
        "listen()\n"
        "import torch, shoal.train\n"
        "ctx = shoal.train.init()\n"
        f"steps = {LOOP_STEPS}\n"
        "loss = torch.zeros(())\n"
        "began = time.thread_time()\n"
        "for _ in ctx.steps(itertools.repeat(None), steps=steps):\n"
        "    ctx.log(loss=loss)\n"
        "told = time.thread_time() - began\n"
        "began = time.thread_time()\n"
        "for _ in itertools.repeat(None, steps):\n"
        "    pass\n"
        "print((told - (time.thread_time() - began)) / steps * 1e6)\n"
    )
    root = str(Path(__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": f"{root}/src:{root}", "OMP_NUM_THREADS": "1"}
    runs = []
    for _ in range(TURNS):
        said = subprocess.run(
            [sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True
        )
        runs.append(float(said.stdout.split()[-1]))
    cost_us = statistics.median(runs)
    return {
        "us_per_step": round(cost_us, 2),
        f"percent_of_a_step_of_{STEP_MS:g}_ms": round(cost_us / (STEP_MS * 1000) * 100, 4),
        "goal_percent": GOAL_PERCENT,
    }


def measure_live() -> dict[str, float]:
    """CPU time of the agent and the controller while two members of one node report their steps:
    what observation takes from the machine that trains."""
    from shoal.control.home import ClusterConfig, Home
    from shoal.control.lifecycle import bring_up, take_down
    from shoal.model.node import NodeSpec

    script = (
        "import time\n"
        "from shoal.train.beats import Beats\n"
        "beats = Beats()\n"
        "for step in range(1, 1 << 30):\n"
        "    time.sleep(0.01)\n"
        "    if time.perf_counter_ns() > beats.due_ns:\n"
        "        beats.log({'loss': 1 / step})\n"
        "        beats.send(step=step, steps=step, compute_us=step * 10_000)\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder))
        node = NodeSpec(id="n1", gpus=2, cpu_milli=16_000, memory_mb=4_000)
        bring_up(home, ClusterConfig(nodes=(node,), port=0), lambda _: None)
        try:
            from shoal.client import Client
            from shoal.model.job import JobSpec

            env = {"PATH": os.environ.get("PATH", os.defpath)}
            env["PYTHONPATH"] = str(Path(__file__).parent.parent / "src")
            with Client.at_home(home.path) as client:
                idle = shares(home, LIVE_S)
                job = client.submit(
                    JobSpec(command=(sys.executable, "-c", script), members=2, env=env)
                )
                client.job(job.id, wait_for="running", wait_s=30)
                while not client.job_series(job.id).points:
                    time.sleep(0.2)
                busy = shares(home, LIVE_S)
                client.cancel(job.id)
        finally:
            take_down(home, lambda _: None)
    return {
        "agent_idle_percent": idle[0],
        "agent_percent": busy[0],
        "controller_idle_percent": idle[1],
        "controller_percent": busy[1],
    }


def shares(home: Any, seconds: float) -> tuple[float, float]:
    """In percent of a core: the agent of n1, and the controller."""
    agent = json.loads((home.node("n1") / "agent.json").read_text())["pid"]
    controller = json.loads(home.address.read_text())["pid"]
    before = [cpu_s(pid) for pid in (agent, controller)]
    time.sleep(seconds)
    after = [cpu_s(pid) for pid in (agent, controller)]
    first, second = (round((b - a) / seconds * 100, 2) for a, b in zip(before, after, strict=True))
    return first, second


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pieces(work: Iterator[Any]) -> Iterator[tuple[Any, float]]:
    """The stream's output, with the time of each piece, which is how long others wait."""
    end = object()
    while True:
        piece, took_s = timed(lambda: next(work, end))
        yield "" if piece is end else piece, took_s
        if piece is end:
            return


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.thread_time()
    result = work()
    return result, time.thread_time() - began


def report(figures: dict[str, Any]) -> None:
    reports, metrics = figures["reports"], figures["metrics"]
    rows: list[tuple[str, str]] = [
        ("nodes, members", f"{figures['nodes']}, {figures['members']}"),
        ("beats taken per second of one core", f"{reports['beats_per_s']:,.0f}"),
        ("one report of each node per second takes", f"{reports['share_of_a_core_percent']} %"),
        ("of that decode, step, look (ms)", " ".join(parts(reports))),
        ("/metrics, ms", f"{metrics['whole_ms']}, longest pause {metrics['longest_pause_ms']}"),
        ("/metrics, samples and bytes", f"{metrics['samples']:,}, {metrics['bytes']:,}"),
    ]
    for name, kept in figures["kept"].items():
        text = f"{kept['bytes']:,} ({kept['bytes_per_job_hour']:,} per hour)"
        rows.append((f"bytes kept of a job: {name}", text))
    for name, value in {**figures.get("loop", {}), **figures.get("live", {})}.items():
        rows.append((name.replace("_", " "), str(value)))
    print(table(("what", "figure"), rows), flush=True)


def parts(reports: dict[str, float]) -> Iterator[str]:
    for name in ("decode_ms", "step_ms", "look_ms"):
        yield str(reports[name])


if __name__ == "__main__":
    main()
