"""The supplier and a real Slurm. A stub takes the place of the program on the machines."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
from harness.slurm import Slurm
from harness.waiting import until

from shoal.engines.slurm.machine import NODE_LABEL
from shoal.engines.slurm.read import jobs_of_json, limited, orders, phase_of
from shoal.engines.slurm.supplier import SlurmSupplier
from shoal.model.node import NodeSpec
from shoal.model.supply import OrderPhase, OrderStatus, Provision, Release, Supply
from shoal.ports import SupplyContext, SupplyError

CLUSTER = "1a2b3c4d"
PENDING, RUNNING, ENDED = OrderPhase.PENDING, OrderPhase.RUNNING, OrderPhase.ENDED
STUB = """#!/bin/sh
env >"$(dirname "$3")/seen.$SLURMD_NODENAME"
trap 'exit 0' TERM
sleep 600 &
wait
"""
SUPPLY = Supply(name="s", engine="slurm", gpus=2, cpu_milli=2000, memory_mb=500, most=8)


class World:
    def __init__(self, real: Slurm, home: Path) -> None:
        self.real = real
        self.home = home
        python = home / "python"
        python.write_text(STUB)
        python.chmod(0o755)
        self.context = SupplyContext(
            cluster=CLUSTER,
            home=home,
            join_url="https://head:7700",
            join_token="shoal_id_secret.f",
            python=str(python),
        )
        self.supplier = SlurmSupplier(self.context, real.env)

    def order(self, id_: str, supply: Supply = SUPPLY) -> None:
        nodes = tuple(f"s-{number}" for number in range(supply.lot))
        asyncio.run(self.supplier.provision(Provision(order=id_, supply=supply, nodes=nodes)))

    def release(self, id_: str) -> None:
        asyncio.run(self.supplier.release(Release(order=id_, engine="slurm")))

    def look(self) -> dict[str, OrderStatus]:
        report = asyncio.run(self.supplier.look())
        assert not report.problem, report.problem
        return {order.order: order for order in report.orders}

    def until(self, id_: str, fact: Callable[[OrderStatus], bool]) -> OrderStatus:
        def looked() -> OrderStatus | None:
            found = self.look().get(id_)
            return found if found is not None and fact(found) else None

        found = until(looked, id_, lambda: f"{self.look().get(id_)}\n{self.real.logs()}")
        assert found is not None
        return found

    def running(self, id_: str, supply: Supply = SUPPLY) -> OrderStatus:
        self.order(id_, supply)
        return self.until(id_, lambda found: found.phase is RUNNING)

    def ended(self, id_: str) -> OrderStatus:
        return self.until(id_, lambda found: found.phase is ENDED)

    def update(self, *words: str) -> None:
        self.real.run("scontrol", "update", *words)


@pytest.fixture
def world(real: Slurm, tmp_path: Path) -> Iterator[World]:
    made = World(real, tmp_path)
    yield made
    real.clear()


def numbers() -> Iterator[int]:
    yield from range(int(time.time() * 10) % 10**9, 10**12)


IDS = numbers()


@pytest.fixture
def id_() -> str:
    return f"o{next(IDS)}"


def test_an_order_is_a_job_whose_machines_get_what_the_supply_says(world: World, id_: str) -> None:
    lot = Supply(
        name="s", engine="slurm", gpus=2, cpu_milli=3000, memory_mb=600, lot=2, lasts_ms=600_000
    )
    order = world.running(id_, lot)
    world.order(id_, lot)  # a second command changes nothing
    assert re.fullmatch(r"\d+", order.handle) and order.reason == ""
    name, comment = world.real.run(
        "squeue", "--noheader", f"--jobs={order.handle}", "--format=%j\t%k"
    ).split("\t")
    assert name == f"shoal-{CLUSTER}-{id_}" and f"order {id_} of supply s" in comment
    folder = world.home / "slurm"
    world.real.wait("both machines", lambda: len(list(folder.glob("seen.*"))) == 2)
    found = (folder / "seen.n1").read_text()
    for wanted in ("SLURM_CPUS_ON_NODE=3", "SLURM_MEM_PER_NODE=600", "CUDA_VISIBLE_DEVICES=0,1"):
        assert wanted in found.splitlines()
    end = int(re.search(r"SLURM_JOB_END_TIME=(\d+)", found)[1])  # type: ignore[index]
    assert 0 < end - time.time() <= 600
    assert str(end) in (folder / f"{id_}.ends").read_text()
    assert "secret" not in found and len(world.look()) == 1
    private = [path.name for path in folder.iterdir() if path.stat().st_mode & 0o077]
    assert folder.stat().st_mode & 0o077 == 0 and private in ([], [f"{id_}.out"])
    world.release(id_)
    assert not world.ended(id_).reason.startswith("FAILED")
    world.release(id_)
    assert not (folder / f"{id_}.json").exists()


def test_json_says_the_same_as_lines_of_the_real_one(world: World, id_: str) -> None:
    order = world.running(id_)
    found = orders(
        jobs_of_json(world.real.run("squeue", "--states=all", "--json").encode()), CLUSTER
    )[id_]
    assert [job.id for job in found] == [order.handle]
    assert found[0].ends_s is None or not limited(found[0].ends_s, time.time())
    assert phase_of(found[0]) == (RUNNING, False)


def test_a_waiting_order_has_slurms_reason(world: World, id_: str) -> None:
    world.order(id_, Supply(name="s", engine="slurm", gpus=1, options={"partition": "short"}))
    world.until(id_, lambda found: found.phase is RUNNING)
    late = f"{id_}1"
    long = Supply(name="s", engine="slurm", lasts_ms=3_600_000, options={"partition": "short"})
    world.order(late, long)
    found = world.until(late, lambda found: "PartitionTimeLimit" in found.reason)
    assert found.phase is PENDING and "lasts: " in found.reason
    big = f"{id_}2"
    world.order(big, Supply(name="s", engine="slurm", gpus=8, lot=4))
    found = world.until(big, lambda found: found.reason in ("Resources", "Priority"))
    world.release(big)
    assert world.ended(big).reason.startswith("CANCELLED")


def test_a_held_order_says_who_can_help(world: World, id_: str) -> None:
    world.order(id_, Supply(name="s", engine="slurm", gpus=8, lot=4))
    order = world.until(id_, lambda found: True)
    world.order(f"{id_}1", Supply(name="s", engine="slurm", gpus=8, lot=4))
    held = world.until(f"{id_}1", lambda found: True)
    world.real.run("scontrol", "hold", held.handle)
    assert order.handle != held.handle
    found = world.until(f"{id_}1", lambda found: "JobHeld" in found.reason)
    assert found.phase is PENDING and "scontrol release" in found.reason


def test_an_allocation_that_somebody_cancels_has_ended_against_our_will(
    world: World, id_: str
) -> None:
    order = world.running(id_)
    world.real.run("scancel", order.handle)
    found = world.ended(id_)
    assert found.failed and found.reason.startswith("CANCELLED")


@pytest.mark.soak  # Slurm counts in minutes; test_live.py shows jobs that leave before that
def test_an_allocation_whose_time_is_up_has_ended_and_notice_was_given(
    world: World, id_: str
) -> None:
    limited = Supply(name="s", engine="slurm", gpus=1, lasts_ms=600_000)
    order = world.running(id_, limited)
    world.real.wait("the machine", (world.home / "slurm" / "seen.n1").exists)
    ends = world.home / "slurm" / f"{id_}.ends"
    before = ends.read_text()
    # Slurm looks at time limits every 30 s, so a nearer end might come before its notice.
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 40))
    world.update(f"JobId={order.handle}", f"EndTime={soon}")
    world.until(id_, lambda _: ends.read_text() != before)  # the machines are told of the new end
    world.real.wait("Slurm's notice", (world.home / "slurm" / f"{id_}.notice").exists)
    found = world.ended(id_)
    assert found.reason.startswith("TIMEOUT") and not found.failed


def test_an_order_that_is_preempted_has_ended_and_does_not_come_back(
    world: World, id_: str
) -> None:
    there = Supply(name="s", engine="slurm", gpus=8, options={"nodelist": "n4"})
    world.running(id_, there)
    urgent = world.real.sbatch("--partition=urgent", "--gpus-per-node=8", script="sleep 600")
    found = world.ended(id_)
    assert found.failed and found.reason.startswith("PREEMPTED")
    world.real.run("scancel", urgent)


def test_jobs_of_others_are_neither_seen_nor_touched(world: World, id_: str) -> None:
    mine = world.real.sbatch("--job-name=train", script="sleep 600")
    other = world.real.sbatch("--job-name=shoal-99999999-o1", script="sleep 600")
    nobody = world.real.sbatch(
        "--uid=nobody", f"--job-name=shoal-{CLUSTER}-{id_}", script="sleep 600"
    )
    world.real.wait(
        "three jobs", lambda: _states_of(world.real, mine, other, nobody) == {"RUNNING"}
    )
    assert id_ not in world.look()
    world.order(id_)  # though somebody else has a job of this name
    world.until(id_, lambda found: found.phase is RUNNING)
    world.release(id_)
    world.ended(id_)
    assert _states_of(world.real, mine, other, nobody) == {"RUNNING"}


BAD: dict[str, tuple[Supply, str]] = {
    "partition": (
        Supply(name="s", engine="slurm", options={"partition": "nope"}),
        r"^s: partition: .*nope.*; there are main, short, closed, urgent",
    ),
    "gpus": (Supply(name="s", engine="slurm", gpus=9), "^s: gpus, cpus, memory or constraint: "),
    "gres": (Supply(name="s", engine="slurm", options={"gres": "tpu:1"}), "^s: gpus: "),
    "memory": (Supply(name="s", engine="slurm", memory_mb=99_999_999), "^s: memory: "),
    "constraint": (
        Supply(name="s", engine="slurm", options={"constraint": "nope"}),
        "^s: constraint: ",
    ),
    "nodelist": (
        Supply(name="s", engine="slurm", options={"nodelist": "n99"}),
        "^s: nodelist or exclude: ",
    ),
    "reservation": (
        Supply(name="s", engine="slurm", options={"reservation": "nope"}),
        "^s: reservation: ",
    ),
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_supply_is_refused_with_the_field_to_fix(world: World, id_: str, field: str) -> None:
    supply, said = BAD[field]
    with pytest.raises(SupplyError, match=said) as refused:
        world.order(id_, supply)
    assert "\n" not in str(refused.value)
    assert not (world.home / "slurm" / f"{id_}.json").exists()


def test_a_head_without_slurms_commands_says_so(tmp_path: Path) -> None:
    context = SupplyContext(
        cluster=CLUSTER, home=tmp_path, join_url="", join_token="", python="/usr/bin/python3"
    )
    report = asyncio.run(SlurmSupplier(context, {"PATH": "/nowhere"}).look())
    assert "sbatch cannot be started here" in report.problem and "PATH" in report.problem


def test_a_command_that_ends_at_once_is_heard_on_the_controllers_own_loop(tmp_path: Path) -> None:
    for name, says in (("sbatch", "echo slurm 22.05.8"), ("squeue", "exit 0")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    context = SupplyContext(
        cluster=CLUSTER, home=tmp_path, join_url="", join_token="", python="/usr/bin/python3"
    )
    supplier = SlurmSupplier(context, {"PATH": f"{tmp_path}:/bin"})

    async def looks() -> set[str]:
        return {(await supplier.look()).problem for _ in range(30)}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(looks()) == {""}


@pytest.mark.parametrize("text", ["slurm 21.08.8", "slurm 20.11.0"])
def test_a_slurm_that_is_too_old_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho {text}\n")
    (tmp_path / "sbatch").chmod(0o755)
    context = SupplyContext(
        cluster=CLUSTER, home=tmp_path, join_url="", join_token="", python="/usr/bin/python3"
    )
    report = asyncio.run(SlurmSupplier(context, {"PATH": str(tmp_path) + ":/bin"}).look())
    assert "Shoal needs 22.05 or newer" in report.problem


def test_a_program_that_is_not_there_is_named_in_the_reason(world: World, id_: str) -> None:
    world.order(id_, Supply(name="s", engine="slurm", options={"python": "/nowhere/python"}))
    found = world.ended(id_)
    assert found.failed and "/nowhere/python" in found.reason
    assert found.reason.startswith("python: is not on the machines")


def test_an_operator_may_drain_a_machine_and_an_ordinary_user_is_told_why_not(
    world: World, id_: str
) -> None:
    node = NodeSpec(id="s-1", cpu_milli=1, memory_mb=1, labels={NODE_LABEL: "n2"})
    asyncio.run(world.supplier.drain(node, "GPU 3 is broken"))
    try:
        assert "Shoal: GPU 3 is broken" in world.real.run("scontrol", "show", "node", "n2")
    finally:
        world.update("NodeName=n2", "State=RESUME")
    pid = os.fork()
    if pid == 0:
        os.setgid(65534)
        os.setuid(65534)
        try:
            asyncio.run(world.supplier.drain(node, "GPU 3 is broken"))
        except SupplyError as error:
            os._exit(0 if "exclude=n2" in str(error) and "Invalid user id" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _states_of(real: Slurm, *ids: str) -> set[str]:
    return set(real.run("squeue", "--noheader", f"--jobs={','.join(ids)}", "--format=%T").split())
