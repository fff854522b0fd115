"""What the demo asks of its cluster: the nodes, and a queue of mixed jobs."""

from __future__ import annotations

import sys

from shoal.cli.layout import virtual_nodes
from shoal.cli.machine import Gpus, Machine
from shoal.model.job import JobSpec, Restart
from shoal.model.node import NodeSpec
from shoal.model.service import Probe, Scale, ServiceSpec

NODES = 4
GPUS = 8

_STEPS = "for step in $(seq {count}); do echo member $SHOAL_MEMBER step $step; sleep 0.5; done"
_WORK = (sys.executable, "-m", "shoal.cli.demo.work")
ASK_S = 10  # so long the service is asked
TRAIN_STEPS = 80


def nodes() -> tuple[NodeSpec, ...]:
    """The same on every machine: the demo's jobs hardly use what they ask for."""
    machine = Machine("demo", cpus=2 * GPUS, memory_mb=NODES * 64 * 1024, gpus=Gpus(0))
    return virtual_nodes(
        machine, nodes=NODES, gpus=GPUS, cpu_milli=None, memory_mb=None, topology="2x2"
    )


def jobs(env: dict[str, str], workdir: str) -> list[JobSpec]:
    """A training run, gangs that need whole nodes, gangs that share them, single GPUs, one that
    fails at first, and a map that needs no GPU; mixed, as people submit them."""

    def job(name: str, members: int, gpus: int, seconds: float) -> JobSpec:
        steps = _STEPS.format(count=int(seconds * 2))
        return JobSpec(
            command=("sh", "-c", steps),
            name=name,
            members=members,
            gpus=gpus,
            env=env,
            workdir=workdir,
            stop_grace_ms=1000,
        )

    flaky = JobSpec(
        command=("sh", "-c", 'echo attempt $SHOAL_ATTEMPT; sleep 2; test "$SHOAL_ATTEMPT" -gt 1'),
        name="flaky",
        gpus=1,
        env=env,
        workdir=workdir,
        restart=Restart.ON_FAILURE,
        retries=3,
        backoff_ms=500,
    )
    train = JobSpec(
        command=(*_WORK, "train", str(TRAIN_STEPS)),
        name="train-a",
        members=2,
        gpus=5,
        env=env,
        workdir=workdir,
        stop_grace_ms=1000,
    )
    lines = JobSpec(command=(*_WORK, "map"), name="map", env=env, workdir=workdir)
    return [
        train,
        *[job(f"eval-{number}", 1, 1, 2 + number % 3) for number in range(1, 9)],
        flaky,
        lines,
        job("score", 1, 4, 5),
        *[job(f"tune-{number}", 2, 2, 3 + number % 2) for number in range(1, 5)],
        *[job(f"eval-{number}", 1, 1, 2 + number % 3) for number in range(9, 17)],
        job("train-b", 2, 8, 4),
        *[job(f"tune-{number}", 2, 2, 3 + number % 2) for number in range(5, 8)],
    ]


def service(env: dict[str, str], workdir: str) -> ServiceSpec:
    replica = JobSpec(command=(*_WORK, "serve"), gpus=1, env=env, workdir=workdir)
    scale = Scale(least=2, most=3, target=4)
    return ServiceSpec(name="chat", replica=replica, scale=scale, probe=Probe(path="/health"))


def asker(url: str, env: dict[str, str], workdir: str) -> JobSpec:
    """Puts the service under load."""
    return JobSpec(command=(*_WORK, "ask", url, str(ASK_S)), name="ask", env=env, workdir=workdir)
