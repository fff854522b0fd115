"""The simulated world keeps the contract: what is proved in it holds for engines that do, too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from storm.controller import Controller
from storm.node import Fate
from storm.witness import End, Witness
from storm.world import World

from shoal.model.commands import Envelope, Launch
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import NodeGone, NodeReport
from shoal.ports import Engine, Inbox
from tests.engines.contract import Contract
from tests.engines.hand import PROGRAMS, Rig

PAUSE_MS = 5
FATES = {program.argv: program.fate for program in PROGRAMS}


class Ear(Controller):
    """In the place of the world's controller: hands on what it hears, and decides nothing."""

    inbox: Inbox

    def start(self) -> None:
        self.up = True
        self.life += 1
        self._begun()

    def hear(self, report: NodeReport) -> None:
        self.inbox.heard(report)

    def gone(self, gone: NodeGone) -> None:
        self.inbox.gone(gone)

    def send(self, node: str, envelope: Envelope) -> None:
        self._send(node, envelope)


class SimEngine:
    """The world, seen as an engine."""

    fences = False

    def __init__(self, world: World, ear: Ear) -> None:
        self._world = world
        self._ear = ear

    async def start(self, inbox: Inbox) -> None:
        self._ear.inbox = inbox
        self._world.start_controller()

    def send(self, node: str, envelope: Envelope) -> None:
        self._ear.send(node, envelope)

    async def resend(self) -> None:
        self._ear.up = False
        self._world.start_controller()

    async def close(self) -> None:
        self._ear.up = False


class Starts(Witness):
    def __init__(self) -> None:
        self.started_as: Counter[MemberRef] = Counter()
        self.alive: set[MemberRef] = set()

    def started(self, node: str, launch: Launch) -> None:
        self.started_as[launch.ref] += 1
        self.alive.add(launch.ref)

    def ended(self, ref: MemberRef, code: int | None, how: End) -> None:
        self.alive.remove(ref)


class SimRig(Rig):
    nodes = ("n1", "n2")

    def __init__(self, scratch: Path, *, certain: bool) -> None:
        super().__init__(scratch)
        self.certain = certain
        self._witness = Starts()
        self._world = World(Policy(), _fate, witness=self._witness)
        self._ear = Ear(
            self._world.timeline,
            self._world.disk,
            Policy(),
            self._world._send,
            witness=self._witness,
            begun=self._world._resend,
        )
        self._world.controller = self._ear
        for node in self.nodes:
            self._world.add_node(NodeSpec(id=node, cpu_milli=16_000, memory_mb=4_000, gpus=4))

    def engine(self) -> Engine:
        return SimEngine(self._world, self._ear)

    def kill(self, node: str) -> None:
        self._world.power_off(node, known=self.certain)

    def revive(self, node: str) -> None:
        self._world.boot(node)

    async def pause(self) -> None:
        self._let_pass(PAUSE_MS)

    def starts(self, ref: MemberRef) -> int:
        return self._witness.started_as[ref]

    def running(self, ref: MemberRef) -> bool:
        return ref in self._witness.alive

    def release(self, ref: MemberRef) -> None:
        fate = self._world.machines["n1"].processes[ref].fate
        assert fate.duration_ms is not None
        self._let_pass(fate.duration_ms)

    def _let_pass(self, duration_ms: int) -> None:
        self._world.timeline.run(self._world.timeline.now_ms + duration_ms)


def _fate(launch: Launch) -> Fate:
    return FATES[launch.argv]


@pytest.fixture(params=[True, False], ids=["deaths are known", "deaths are silent"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> SimRig:
    return SimRig(tmp_path, certain=request.param)


class TestSim(Contract):
    pass
