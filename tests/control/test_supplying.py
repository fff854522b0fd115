"""Engines that bring nodes are driven one call at a time, whatever they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.control import supplying
from shoal.control.logs import LogStore
from shoal.control.loop import ControlLoop
from shoal.control.store.sqlite import SqliteStore
from shoal.control.supplying import Supplying, build_supplier
from shoal.core.answers.why import waiting_reason
from shoal.model.job import JobSpec
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy
from shoal.model.report import Accepted, NodeReport, Submit
from shoal.model.supply import (
    OrderPhase,
    OrderStatus,
    Provision,
    Release,
    Supply,
    SupplyReport,
)
from shoal.ports import Inbox, Supplier, SupplyContext, SupplyError
from tests.control.test_loop import HandClock

GPU = Supply(name="gpu", engine="fake", gpus=8, most=2, idle_ms=60_000)


class NoNodes:
    fences = True

    async def start(self, inbox: Inbox) -> None:
        self.inbox = inbox

    def send(self, *_: object) -> None: ...

    async def resend(self) -> None: ...

    async def close(self) -> None: ...


class FakeSupplier:
    """Has what it was asked for. `down` and `refusal` are what it answers instead."""

    engine = "fake"

    def __init__(self) -> None:
        self.orders: dict[str, OrderStatus] = {}
        self.asked: list[Provision] = []
        self.drained: list[str] = []
        self.down = self.refusal = ""
        self.calls = self.calls_at_once = 0
        self.closed = False

    async def _call(self) -> None:
        self.calls += 1
        self.calls_at_once = max(self.calls_at_once, self.calls)
        await asyncio.sleep(0)
        self.calls -= 1
        if self.down:
            raise SupplyError(self.down)

    async def look(self) -> SupplyReport:
        await self._call()
        return SupplyReport(engine=self.engine, orders=tuple(self.orders.values()))

    async def provision(self, command: Provision) -> None:
        await self._call()
        if self.refusal:
            raise SupplyError(self.refusal)
        self.asked.append(command)
        self.orders.setdefault(command.order, status(command.order, OrderPhase.PENDING, "Busy"))

    async def release(self, command: Release) -> None:
        await self._call()
        self.orders[command.order] = status(command.order, OrderPhase.ENDED)

    async def drain(self, node: NodeSpec, why: str) -> None:
        self.drained.append(f"{node.id}: {why}")

    async def close(self) -> None:
        self.closed = True


def status(order: str, phase: OrderPhase, reason: str = "") -> OrderStatus:
    return OrderStatus(order=order, phase=phase, reason=reason)


class Scene:
    def __init__(self, path: Path) -> None:
        self.clock = HandClock()
        self.engine = NoNodes()
        self.fake = FakeSupplier()
        self.missing = ""
        policy = Policy(supply=(GPU,))
        self.loop = ControlLoop(
            SqliteStore(path / "shoal.db"), self.engine, self.clock, policy, LogStore(path)
        )
        self.supplying = Supplying(self.loop, self.build)

    def build(self, _engine: str) -> Supplier:
        if self.missing:
            raise SupplyError(self.missing)
        return self.fake

    async def until(self, fact: Callable[[], bool]) -> None:
        """The cluster's time passes quickly; a real minute is the bound."""
        async with asyncio.timeout(120):
            while True:
                await self.loop.settled()
                if fact():
                    return
                self.clock.ms += 100
                self.loop.drifted(0)
                self.loop._pace.now()
                await asyncio.sleep(0.002)

    async def submit(self) -> str:
        answer = await self.loop.request(Submit(JobSpec(command=("true",), gpus=8)))
        assert isinstance(answer, Accepted)
        return answer.id

    def why(self, job_id: str) -> str:
        loop = self.loop
        job = loop.state.jobs[job_id]
        return waiting_reason(loop.state, job, loop.policy, self.clock.now_ms())

    def play(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            tasks = [
                asyncio.create_task(self.loop.run()),
                asyncio.create_task(self.supplying.run()),
            ]
            try:
                await act()
            finally:
                for task in reversed(tasks):
                    task.cancel()
                await asyncio.wait(tasks)

        asyncio.run(run())


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    for name in ("LOOK_S", "LOOK_SOON_S", "PROBLEM_PAUSE_S", "ENGINES_LOOK_S"):
        monkeypatch.setattr(supplying, name, 0.01)
    monkeypatch.setattr(supplying, "PROBLEM_PAUSE_S_MAX", 0.02)
    return Scene(tmp_path)


def test_an_order_is_placed_and_its_node_joins_and_runs_the_job(scene: Scene) -> None:
    async def act() -> None:
        job_id = await scene.submit()
        await scene.until(lambda: bool(scene.fake.orders))
        await scene.until(lambda: "Busy" in scene.why(job_id))
        command = scene.fake.asked[0]  # it may be asked again until a report shows the order
        spec = NodeSpec(
            id=command.nodes[0],
            gpus=8,
            cpu_milli=8000,
            memory_mb=100,
            origin="gpu",
            order=command.order,
        )
        scene.fake.orders["o1"] = status("o1", OrderPhase.RUNNING)
        scene.engine.inbox.heard(NodeReport(spec=spec, incarnation=1, sequence=1))
        await scene.until(lambda: scene.loop.state.jobs[job_id].active)
        assert scene.fake.calls_at_once == 1

    scene.play(act)
    assert scene.fake.closed


def test_a_refusal_ends_the_order_and_is_not_repeated_at_once(scene: Scene) -> None:
    scene.fake.refusal = "sbatch: error: invalid account"

    async def act() -> None:
        job_id = await scene.submit()
        await scene.until(lambda: bool(scene.loop.state.setbacks))
        assert not scene.loop.state.orders
        assert "failed: sbatch: error: invalid account; next try in" in scene.why(job_id)
        scene.fake.refusal = ""
        await scene.until(lambda: "o2" in scene.fake.orders)

    scene.play(act)


def test_an_engine_that_is_down_is_an_alarm_until_it_answers(scene: Scene) -> None:
    scene.fake.down = "slurmctld does not answer"

    async def act() -> None:
        job_id = await scene.submit()
        await scene.until(lambda: bool(scene.loop.alarms.texts))
        assert scene.loop.alarms.texts == ("no nodes from fake: slurmctld does not answer",)
        await scene.until(lambda: "cannot be asked: slurmctld" in scene.why(job_id))
        scene.fake.down = ""
        await scene.until(lambda: bool(scene.fake.orders))
        assert not scene.loop.alarms.texts

    scene.play(act)


def test_an_engine_that_hangs_is_given_up_and_asked_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supplying, "CALL_S", 0.05)
    answers = scene.fake.look

    async def hang() -> SupplyReport:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(scene.fake, "look", hang)

    async def act() -> None:
        await scene.until(lambda: bool(scene.loop.alarms.texts))
        assert "could not list its orders within 0.05 s" in scene.loop.alarms.texts[0]
        monkeypatch.setattr(scene.fake, "look", answers)
        await scene.until(lambda: not scene.loop.alarms.texts)

    scene.play(act)


def test_an_engine_that_is_not_installed_is_one_line(scene: Scene) -> None:
    scene.missing = "the engine ray cannot be loaded"

    async def act() -> None:
        await scene.until(lambda: bool(scene.loop.alarms.texts))
        assert scene.loop.alarms.texts == ("no nodes from fake: the engine ray cannot be loaded",)

    scene.play(act)


def test_an_unknown_engine_names_those_that_there_are(tmp_path: Path) -> None:
    context = SupplyContext(cluster="0", home=tmp_path, join_url="", join_token="", python="")
    with pytest.raises(
        SupplyError, match=r"no supplier 'pbs'; there are ec2, kubernetes, ray, slurm$"
    ):
        build_supplier("pbs", context)
