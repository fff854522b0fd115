"""What the demo asks of its cluster: the nodes, and a queue of mixed jobs."""

from __future__ import annotations

import sys

from shoal.cli.layout import virtual_nodes
from shoal.cli.machine import Gpus, Machine
from shoal.model.job import JobSpec, Restart
from shoal.model.node import NodeSpec

NODES = 4
GPUS = 8

_STEPS = "for step in $(seq {count}); do echo rank $RANK step $step; sleep 0.5; done"
_TOKENIZE = """\
import hashlib, time
end, count, word = time.monotonic() + 3, 0, b'shoal'
while time.monotonic() < end:
    word, count = hashlib.sha256(word).digest(), count + 1
    time.sleep(0.001)
print(count, 'words', word.hex()[:8])
"""


def nodes() -> tuple[NodeSpec, ...]:
    """The same on every machine: the demo's jobs hardly use what they ask for."""
    machine = Machine("demo", cpus=2 * GPUS, memory_mb=NODES * 64 * 1024, gpus=Gpus(0))
    return virtual_nodes(
        machine, nodes=NODES, gpus=GPUS, cpu_milli=None, memory_mb=None, topology="2x2"
    )


def jobs(env: dict[str, str], workdir: str) -> list[JobSpec]:
    """Gangs that need whole nodes, gangs that share them, single GPUs, one that fails at first,
    and one that needs no GPU; mixed, as people submit them."""

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
    tokenize = JobSpec(
        command=(sys.executable, "-c", _TOKENIZE), name="tokenize", env=env, workdir=workdir
    )
    return [
        job("train-a", 2, 5, 8),
        *[job(f"eval-{number}", 1, 1, 2 + number % 3) for number in range(1, 9)],
        flaky,
        tokenize,
        job("serve-test", 1, 4, 5),
        *[job(f"tune-{number}", 2, 2, 3 + number % 2) for number in range(1, 5)],
        *[job(f"eval-{number}", 1, 1, 2 + number % 3) for number in range(9, 17)],
        job("train-b", 2, 8, 4),
        *[job(f"tune-{number}", 2, 2, 3 + number % 2) for number in range(5, 8)],
    ]
