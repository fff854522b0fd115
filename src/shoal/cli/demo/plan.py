"""The nodes and jobs of the demo."""

from __future__ import annotations

import sys

from shoal.cli.up.hardware import Gpus, Hardware
from shoal.cli.up.node_specs import virtual_nodes
from shoal.model.job import JobSpec, Restart
from shoal.model.node import NodeSpec
from shoal.model.service import Probe, Scale, ServiceSpec

NODES = 4
GPUS = 8

_STEPS = "for step in $(seq {count}); do echo member $SHOAL_MEMBER step $step; sleep 0.5; done"
_WORK = (sys.executable, "-m", "shoal.cli.demo.work")
ASK_S = 16  # how long the service gets requests
TRAIN_STEPS = 150
TRAIN, ASK = "train-a", "ask"  # the jobs that are looked at more closely


def nodes() -> tuple[NodeSpec, ...]:
    """The same on every machine: the demo's jobs use little of what they request."""
    machine = Hardware("demo", cpus=2 * GPUS, memory_mb=NODES * 64 * 1024, gpus=Gpus(0))
    return virtual_nodes(
        machine, nodes=NODES, gpus=GPUS, cpu_milli=None, memory_mb=None, topology="2x2"
    )


# It fails once by itself, also if its node is killed before that.
_FLAKY = "echo attempt $SHOAL_ATTEMPT; sleep 2; test -e failed || { touch failed; exit 1; }"


def jobs(env: dict[str, str], workdir: str) -> list[JobSpec]:
    """A mix: a training run, gangs on whole and on shared nodes, jobs with one GPU, a job that
    fails at first, and a map without GPUs."""

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
        command=("sh", "-c", _FLAKY),
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
        name=TRAIN,
        priority=1,  # it goes on at once when its node has died
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
    """The job that sends requests to the service."""
    return JobSpec(command=(*_WORK, "ask", url, str(ASK_S)), name=ASK, env=env, workdir=workdir)
