"""The Ray engine keeps the contract: two homes of one machine are two nodes of a real Ray."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.control.home import Home
from shoal.control.lifecycle import take_down
from shoal.engines.agentlink import write_spec
from shoal.engines.ray import machine
from shoal.engines.ray.engine import RayEngine
from shoal.engines.ray.render import OFFSETS
from shoal.files import held
from shoal.kernel import own_address
from shoal.model.node import NodeSpec
from shoal.ports import Engine
from tests.engines.contract import ProcessContract
from tests.engines.hand import WAIT_S, Rig
from tests.needs import need

need("ray")

RAYLET = OFFSETS["--node-manager-port"]


class RayRig(Rig):
    nodes = ("n1", "n2")
    certain = True  # that an agent has died, on a machine that lives; the rest is silence

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self._homes = {node: Home(scratch / node) for node in self.nodes}
        self._head = self._homes["n1"].path
        for node, home in self._homes.items():
            home.create()
            write_spec(
                home.node(node), NodeSpec(id=node, cpu_milli=16_000, memory_mb=4_000, gpus=4)
            )
        address = own_address()
        machine.make_token(self._head)
        leader = machine.head_of(self._head, address, "n1")
        machine.write_node(self._head, leader)
        machine.start_keeper(self._head)
        machine.wait_for_head(self._head, leader, lambda _: None)
        self.address = leader.head
        # Nodes of one machine share its ports: the second may choose when the first has its own.
        _until(lambda: machine.answers(address, leader.first_port + RAYLET, 1.0), "no raylet")
        other = self._homes["n2"].path
        machine.keep_token(other, (self._head / "ray" / "token").read_text())
        machine.write_node(other, machine.member_of(other, self.address, address, "n2"))
        machine.start_keeper(other)

    def engine(self) -> Engine:
        return RayEngine(self._head, self.address)

    def kill(self, node: str) -> None:
        directory = self._homes[node].node(node)
        info = msgspec.json.decode((directory / "agent.json").read_bytes())
        os.kill(int(info["pid"]), signal.SIGKILL)
        _until(
            lambda: not held(directory / "agent.lock") or _pid(directory) != int(info["pid"]),
            f"{node} does not die",
        )

    def end(self) -> None:
        for home in reversed(self._homes.values()):
            take_down(home, lambda _: None)


def _until(fact: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not fact():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.01)


def _pid(directory: Path) -> int:
    return int(msgspec.json.decode((directory / "agent.json").read_bytes())["pid"])


@pytest.fixture(scope="module")
def rig() -> Iterator[RayRig]:
    scratch = Path(tempfile.mkdtemp(prefix="shoal-rig-"))
    made = RayRig(scratch)
    try:
        yield made
    finally:
        made.end()
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
class TestRay(ProcessContract):
    pass
