"""A real Ray brings nodes. Whatever happens to Ray, an agent that it brought works on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from harness.ray import RealRay, real_ray
from harness.waiting import until

from shoal.engines.ray import holder
from shoal.engines.ray.supplier import RaySupplier
from shoal.model.supply import OrderPhase, OrderStatus, Provision, Release, Supply, SupplyReport
from shoal.ports import SupplyContext, SupplyError
from tests.engines.contract import ProcessContract
from tests.engines.hand import clean
from tests.engines.ray.rig import RayRig
from tests.needs import need

need("ray")

BOUND_S = 240
# Stands for `shoal join --foreground`: it lives until it is told to end.
AGENT = """#!/bin/bash
env > "$SHOAL_HOME/env"
echo $$ > "$SHOAL_HOME/pid"
echo "$@" >> "$SHOAL_HOME/../$(basename $SHOAL_HOME).starts"
trap 'echo "2026-01-01 00:00:00 the head knows that this node has ended"; exit 0' TERM
while :; do sleep 0.1; done
"""


@pytest.fixture(scope="module")
def ray() -> Iterator[RealRay]:
    with real_ray() as made:
        yield made


@pytest.fixture(scope="class")
def rig(ray: RealRay) -> Iterator[RayRig]:
    scratch = Path(tempfile.mkdtemp(prefix="shoal-rig-"))
    made = RayRig(scratch, ray)
    try:
        yield made
    finally:
        made.end()
        clean(scratch)


@pytest.mark.soak  # the same agents over the same link as in test_linked.py
class TestRay(ProcessContract):
    """Agents that it started keep the contract, over the link. The rest of this file shares the
    Ray, because one takes half a minute to start."""


class Site:
    """A cluster that orders nodes of that Ray."""

    def __init__(self, ray: RealRay, folder: Path) -> None:
        agent = folder / "agent"
        agent.write_text(AGENT)
        agent.chmod(0o755)
        self.cluster = f"{abs(hash(folder)) % 16**8:08x}"
        self.nodes = folder / "nodes"
        self.supply = Supply(
            name="lent",
            engine="ray",
            gpus=5,
            cpu_milli=1000,
            most=8,
            options={
                "address": ray.address,
                "token_file": str(ray.token_file),
                "python": str(agent),
                "folder": str(self.nodes),
            },
        )
        self.context = SupplyContext(
            cluster=self.cluster,
            home=folder,
            join_url="http://127.0.0.1:1",
            join_token="shoal_secret",
            python=sys.executable,
            supplies=lambda: (self.supply,),
        )

    def provision(self, order: str, **changes: object) -> Provision:
        supply = msgspec.structs.replace(self.supply, **changes)
        return Provision(order=order, supply=supply, nodes=(f"n-{order}",))

    def agent(self, order: str) -> int | None:
        return holder.top_of(f"{self.cluster}/{order}")

    def started(self, order: str) -> int:
        """Once nothing else carries its mark: what forks it does, for a moment."""
        path = self.nodes / self.cluster / order / "pid"
        until(lambda: path.exists() and path.read_text() == f"{self.agent(order)}\n")
        return int(path.read_text())

    def starts(self, order: str) -> list[str]:
        path = self.nodes / self.cluster / f"{order}.starts"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def site(ray: RealRay, tmp_path: Path) -> Iterator[Site]:
    made = Site(ray, tmp_path)
    yield made
    for order in holder.orders_here(made.cluster):
        holder.end_order(made.cluster, order)
        until(lambda order=order: made.agent(order) is None)  # type: ignore[misc]


def play(site: Site, scene: Callable[[RaySupplier], Awaitable[None]]) -> None:
    """With one controller, from its start to its end."""

    async def run() -> None:
        supplier = RaySupplier(site.context)
        try:
            await scene(supplier)
        finally:
            await supplier.close()

    asyncio.run(run())


async def look_until(
    supplier: RaySupplier, order: str, fact: Callable[[OrderStatus | None], bool]
) -> OrderStatus | None:
    """Look, as a controller does, until it is so. A Ray that does not answer is looked at again."""
    deadline = time.monotonic() + BOUND_S
    seen: object = None
    while time.monotonic() < deadline:
        try:
            report: SupplyReport = await supplier.look()
            seen = next((one for one in report.orders if one.order == order), None)
            if fact(seen):
                return seen
        except SupplyError as error:
            seen = error
        await asyncio.sleep(0.2)
    raise AssertionError(f"{order} is {seen}")


def runs(status: OrderStatus | None) -> bool:
    return status is not None and status.phase is OrderPhase.RUNNING and not status.reason


def ended(status: OrderStatus | None) -> bool:
    return status is not None and status.phase is OrderPhase.ENDED


async def release(supplier: RaySupplier, *orders: str) -> None:
    for order in orders:
        await supplier.release(Release(order=order, engine="ray"))
        await look_until(supplier, order, ended)


@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_an_order_runs_with_a_clean_environment_and_holds_its_gpus(site: Site) -> None:
    async def scene(supplier: RaySupplier) -> None:
        assert (await supplier.look()).orders == ()
        for order in ("o1", "o2"):
            await supplier.provision(site.provision(order))
            await supplier.provision(site.provision(order))  # said twice, done once
        first = await look_until(supplier, "o1", runs)
        assert first is not None
        assert first.handle
        reason = "none of Ray's 1 node has 5 GPUs and 1 CPU free"
        await look_until(supplier, "o2", lambda one: one is not None and one.reason == reason)
        until(lambda: len(site.starts("o1")) == 1)
        words = site.starts("o1")[0]
        assert words.startswith("-m shoal.main join http://127.0.0.1:1 --foreground --name n-o1 ")
        assert "--gpus 5" in words
        assert "--label pool=lent" in words
        env = (site.nodes / site.cluster / "o1" / "env").read_text().splitlines()
        assert [line for line in env if line.startswith(("RAY_", "OMP_"))] == []
        assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4" in env
        assert "SHOAL_JOIN_TOKEN=shoal_secret" in env
        await release(supplier, "o1")
        await look_until(supplier, "o2", runs)
        await release(supplier, "o2")
        assert site.agent("o1") is None
        assert site.agent("o2") is None
        assert not (site.nodes / site.cluster / "o1").exists()

    play(site, scene)


@pytest.mark.soak
@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_another_controller_finds_the_orders_again(site: Site) -> None:
    async def first(supplier: RaySupplier) -> None:
        await supplier.provision(site.provision("o1"))
        await look_until(supplier, "o1", runs)

    async def second(supplier: RaySupplier) -> None:
        await look_until(supplier, "o1", runs)
        assert len(site.starts("o1")) == 1
        await release(supplier, "o1")

    play(site, first)
    play(site, second)


@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_a_killed_actor_is_replaced_beside_its_agent(ray: RealRay, site: Site) -> None:
    async def scene(supplier: RaySupplier) -> None:
        await supplier.provision(site.provision("o1"))
        await look_until(supplier, "o1", runs)
        agent = site.started("o1")
        (killed,) = ray.holders()
        os.kill(killed, signal.SIGKILL)
        await look_until(
            supplier, "o1", lambda one: runs(one) and ray.holders() not in ([], [killed])
        )
        assert site.agent("o1") == agent
        assert len(site.starts("o1")) == 1
        await release(supplier, "o1")

    play(site, scene)


@pytest.mark.soak
def test_an_agent_that_ends_ends_its_order(site: Site) -> None:
    async def scene(supplier: RaySupplier) -> None:
        await supplier.provision(site.provision("o1"))
        await look_until(supplier, "o1", runs)
        agent = site.started("o1")
        os.kill(agent, signal.SIGTERM)
        status = await look_until(supplier, "o1", ended)
        assert status is not None
        assert (status.reason, status.failed) == ("the head knows that this node has ended", False)

    play(site, scene)


@pytest.mark.soak
def test_an_agent_that_cannot_start_fails_its_order_with_its_own_words(
    site: Site, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\necho $0: No module named shoal >&2; exit 1\n")
    bare.chmod(0o755)

    async def scene(supplier: RaySupplier) -> None:
        wrong = {"o1": "/no/such/python", "o2": str(bare)}
        for order, python in wrong.items():
            options = {**site.supply.options, "python": python}
            await supplier.provision(site.provision(order, options=options))
        words = {"o1": "cannot start /no/such/python", "o2": "No module named shoal"}
        for order in wrong:
            status = await look_until(supplier, order, ended)
            assert status is not None
            assert words[order] in status.reason
            assert status.failed

    play(site, scene)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("address", "127.0.0.1:1", "no response from 127.0.0.1:1 (Connection refused)"),
        (
            "token_file",
            "/no/such/file",
            "token_file: cannot read /no/such/file: No such file or directory",
        ),
        pytest.param(
            *("token_file", "wrong", "refuses our token; name a file that holds it by token_file"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_ray_that_cannot_be_used_says_why_in_one_line(
    site: Site, tmp_path: Path, option: str, value: str, words: str
) -> None:
    async def scene(supplier: RaySupplier) -> None:
        with pytest.raises(SupplyError) as refused:
            await supplier.look()
        assert words in str(refused.value)
        assert "\n" not in str(refused.value)

    if value == "wrong":
        value = str(tmp_path / "wrong")
        Path(value).write_text("0" * 64)
    site.supply = msgspec.structs.replace(
        site.supply, options={**site.supply.options, option: value}
    )
    play(site, scene)


def test_it_is_said_how_the_process_that_talks_to_ray_ended(site: Site, tmp_path: Path) -> None:
    """Ray's library may abort it; here a script does."""
    program = tmp_path / "driver"
    program.write_text("#!/bin/sh\nkill -ABRT $$\n")
    program.chmod(0o755)
    site.context = msgspec.structs.replace(site.context, python=str(program))

    async def scene(supplier: RaySupplier) -> None:
        with pytest.raises(SupplyError, match=r"was ended by SIGABRT; see ray/driver\.log"):
            await supplier.look()

    play(site, scene)


@pytest.mark.soak  # a Ray takes up to a minute to start on two cores that are busy
@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_a_restarted_ray_gets_its_nodes_back_and_disturbs_none(ray: RealRay, site: Site) -> None:
    """Last, because all that Ray knew is gone with it."""

    async def scene(supplier: RaySupplier) -> None:
        await supplier.provision(site.provision("o1"))
        await look_until(supplier, "o1", runs)
        agent = site.started("o1")
        ray.kill("gcs_server")
        assert site.agent("o1") == agent
        with pytest.raises(SupplyError, match=r"Ray|no response"):
            await supplier.look()
        ray.start()
        await look_until(supplier, "o1", lambda one: runs(one) and len(ray.holders()) == 1)
        assert site.agent("o1") == agent
        assert len(site.starts("o1")) == 1
        await release(supplier, "o1")

    play(site, scene)
