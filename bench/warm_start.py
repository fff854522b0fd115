"""How much sooner a gang of two trains when its processes start from a warm interpreter.

Run with `python bench/warm_start.py`. Both kinds take turns on the same private cluster, so that
other load on the machine affects both. All times count from the submission of the job.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from bench.figures import machine, percentile, ratio, table
from shoal.client import Client
from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.model.job import JobSpec
from shoal.model.node import NodeSpec

STAGES = ("torch is imported", "the group of 2 is up", "the first step is done")
WAIT_S = 180.0
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
print("stage", time.time(), flush=True)
if "hold" in sys.argv:
    time.sleep(3600)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("stage", time.time(), flush=True)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(8, 64)).square().mean().backward()
optimizer.step()
print("stage", time.time(), flush=True)
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="of each kind")
    runs = parser.parse_args().runs
    with private_node() as (home, script), Client.at_home(home.path) as client:
        holder = client.submit(spec(script, members=1, extra=("hold",)))
        wait_until_warm(home)
        kinds: dict[str, list[list[float]]] = {"cold": [], "warm": []}
        for _ in range(runs):
            kinds["cold"].append(once(client, spec(script, members=2, cold=True)))
            kinds["warm"].append(once(client, spec(script, members=2)))
        log = agent_log(home)
        started_warm = log.count("starts warm")
        client.cancel(holder.id)
    assert started_warm == 2 * runs, f"{started_warm} of {2 * runs} started warm\n{log}"
    report(runs, kinds)


def report(runs: int, kinds: dict[str, list[list[float]]]) -> None:
    medians = {
        kind: [round(percentile(times, 50), 3) for times in zip(*measured, strict=True)]
        for kind, measured in kinds.items()
    }
    ratios = [
        ratio(cold, warm) for cold, warm in zip(medians["cold"], medians["warm"], strict=True)
    ]
    rows = list(zip(STAGES, medians["cold"], medians["warm"], ratios, strict=True))
    print(table(("submission until, median s", "cold", "warm", "cold / warm"), rows))
    figures = {
        "machine": machine(),
        "runs": runs,
        "stages": STAGES,
        "cold_s": medians["cold"],
        "warm_s": medians["warm"],
        "ratio": ratios[1],
        "ratios": ratios,
    }
    print(msgspec.json.encode(figures).decode())


@contextmanager
def private_node() -> Iterator[tuple[Home, Path]]:
    path = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    home = Home(path / "home")
    script = path / "train.py"
    script.write_text(SCRIPT)
    node = NodeSpec(id="n1", gpus=0, cpu_milli=64_000, memory_mb=64_000)
    try:
        bring_up(home, ClusterConfig(nodes=(node,), port=0), lambda _: None)
        yield home, script
    finally:
        take_down(home, lambda _: None)
        shutil.rmtree(path, ignore_errors=True)


def spec(script: Path, *, members: int, extra: tuple[str, ...] = (), cold: bool = False) -> JobSpec:
    # With an option that changes nothing here, but for which no interpreter is kept warm.
    options = ("-W", "ignore::ResourceWarning") if cold else ()
    command = (sys.executable, *options, str(script), *extra)
    return JobSpec(command=command, members=members, cpu_milli=1000, env={"OMP_NUM_THREADS": "1"})


def once(client: Client, wanted: JobSpec) -> list[float]:
    """Seconds from the submission until the last member has done each stage."""
    began = time.time()
    job = client.submit(wanted)
    deadline = time.monotonic() + WAIT_S
    while client.job(job.id, wait_for="finished", wait_s=10).finished_ms is None:
        assert time.monotonic() < deadline, f"{job.id} does not end"
    members = [
        [
            float(line.split()[1]) - began
            for line in client.logs(job.id, member=member).data.decode().splitlines()
            if line.startswith("stage ")
        ]
        for member in range(wanted.members)
    ]
    assert all(len(stages) == len(STAGES) for stages in members), client.logs(job.id).data.decode()
    return [max(times) for times in zip(*members, strict=True)]


def wait_until_warm(home: Home) -> None:
    deadline = time.monotonic() + WAIT_S
    while "is warm after" not in agent_log(home):
        assert time.monotonic() < deadline, agent_log(home)
        time.sleep(0.1)


def agent_log(home: Home) -> str:
    return (home.node("n1") / "agent.log").read_text()


if __name__ == "__main__":
    main()
