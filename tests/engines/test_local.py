"""The local engine keeps the contract, with real agents and real processes."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.engines.local import LocalEngine
from shoal.machine.files import held
from shoal.model.node import NodeSpec
from tests.engines.contract import ProcessContract
from tests.engines.hand import Rig, clean
from tests.engines.sleep_contract import SleepContract

NODES = ("n1", "n2")


class LocalRig(Rig):
    nodes = NODES
    certain = True  # the keeper lets go of a lock when the last process of a node is gone

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        # A controller's process ends with its engine. Here it goes on, and Python would complain
        # of the keepers that an engine let go of.
        self._made: list[LocalEngine] = []

    def engine(self) -> LocalEngine:
        specs = [NodeSpec(id=id_, cpu_milli=16_000, memory_mb=4_000, gpus=4) for id_ in NODES]
        made = LocalEngine(specs, self.scratch / "nodes", self.scratch / "checkpoints")
        self._made.append(made)
        return made

    def kill(self, node: str) -> None:
        os.kill(self._pid(node, "pid"), signal.SIGKILL)
        _until_free(self._directory(node) / "agent.lock")

    def end(self) -> None:
        for node in self.nodes:
            if held(self._directory(node) / "agent.lock"):
                os.kill(self._pid(node, "keeper"), signal.SIGTERM)
        for node in self.nodes:
            _until_free(self._directory(node) / "agent.lock")
        for link in (node.link for engine in self._made for node in engine._nodes.values()):
            if (keeper := link._process) is not None:
                until(lambda keeper=keeper: keeper.poll() is not None)  # type: ignore[misc]

    def _directory(self, node: str) -> Path:
        return self.scratch / "nodes" / node

    def _pid(self, node: str, which: str) -> int:
        info = msgspec.json.decode((self._directory(node) / "agent.json").read_bytes())
        return int(info[which])


def _until_free(lock: Path) -> None:
    until(lambda: not held(lock), f"{lock} is still held")


@pytest.fixture(scope="module")
def rig() -> Iterator[LocalRig]:
    scratch = Path(tempfile.mkdtemp(prefix="shoal-contract-"))
    made = LocalRig(scratch)
    try:
        yield made
    finally:
        made.end()
        clean(scratch)


class TestLocal(ProcessContract, SleepContract):
    pass
