"""Agents in allocations of a real Slurm keep the contract of engines."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.slurm import Slurm

from shoal.machine.files import LINK_FILE
from tests.engines.contract import ProcessContract
from tests.engines.hand import clean
from tests.engines.linked_rig import LinkedRig


class SlurmRig(LinkedRig):
    """Each node is a job of Slurm's."""

    def __init__(self, scratch: Path, real: Slurm) -> None:
        self.real = real
        self._jobs: dict[str, str] = {}
        super().__init__(scratch)

    def start(self, node: str, *words: str) -> None:
        starter = f"{sys.executable} -m shoal.agent.starter {self.directory(node)} --foreground"
        script = f"exec srun --mem=0 {' '.join((starter, *words))}"
        self._jobs[node] = self.real.sbatch(
            "--mem=4000M", f"--output={self.scratch}/{node}.starter", script=script
        )

    def terminate(self, node: str) -> int:
        job = self._jobs.pop(node)
        self.real.run("scancel", job)
        over = ("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
        self.real.wait(f"the end of {node}", lambda: self.real.run(*over).strip() == "CANCELLED")
        return 0

    def end(self) -> None:
        for node in self._jobs:
            (self.directory(node) / LINK_FILE).unlink()  # nobody would hear its last report
        for node in list(self._jobs):
            self.terminate(node)
        self._door.close()


@pytest.fixture(scope="module")
def rig(real: Slurm) -> Iterator[SlurmRig]:
    scratch = Path(tempfile.mkdtemp(prefix="shoal-slurm-rig-"))
    made = SlurmRig(scratch, real)
    try:
        yield made
    finally:
        made.end()
        clean(scratch)


@pytest.mark.soak  # the same agents over the same link as in test_linked.py
class TestSlurm(ProcessContract):
    pass
