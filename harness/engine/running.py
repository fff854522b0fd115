"""Simulated engines as processes, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


class Process:
    """Simulated engines in one process. They end with a block that has it as its context."""

    def __init__(self, *options: str, ports: Sequence[int] = (0,)) -> None:
        command = [sys.executable, "-m", "harness.engine", *map(str, ports), *options]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            },
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listens at"), f"the engine did not start: {line!r}"
        self.ports = [int(port) for port in line.split()[2:]]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def engines(*options: str, count: int = 1) -> Iterator[list[int]]:
    """The ports of `count` engines in one process."""
    process = Process(*options, ports=[0] * count)
    try:
        yield process.ports
    finally:
        process.close()
