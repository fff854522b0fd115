"""A node that was given some of a machine's GPUs uses these, and no others."""

from __future__ import annotations

import msgspec

from shoal.agent.confine.limits import Device, renumbered, withheld
from shoal.agent.numbers import own_gpus, renamed
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec

NODE = NodeSpec(id="s-1", cpu_milli=1000, memory_mb=1000, gpus=3, order="o1", origin="s")
GIVEN = {"CUDA_VISIBLE_DEVICES": "2,5,7"}
LAUNCH = Launch(
    node="s-1",
    incarnation=1,
    ref=MemberRef("j1", 1, 0),
    argv=("train",),
    env={"CUDA_VISIBLE_DEVICES": "0,2", "SHOAL_GPUS": "0,2"},
    workdir="",
    stop_grace_ms=1000,
    gpus=(0, 2),
)


def test_a_member_gets_the_machines_numbers_of_its_gpus() -> None:
    found = renamed(LAUNCH, own_gpus(NODE, GIVEN))
    assert found.gpus == (2, 7) and found.env["CUDA_VISIBLE_DEVICES"] == "2,7"
    assert found.env["SHOAL_GPUS"] == "0,2"


def test_a_share_sees_its_one_gpu_as_its_daemon_shows_it() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PIPE_DIRECTORY": "/x"}
    share = msgspec.structs.replace(LAUNCH, gpus=(1,), env=env)
    found = renamed(share, own_gpus(NODE, GIVEN))
    assert found.gpus == (5,) and found.env["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_member_without_gpus_sees_none() -> None:
    none = msgspec.structs.replace(LAUNCH, gpus=(), env={"CUDA_VISIBLE_DEVICES": ""})
    assert renamed(none, own_gpus(NODE, GIVEN)) == none


def test_only_an_engine_gives_a_node_some_of_a_machines_gpus() -> None:
    joined = msgspec.structs.replace(NODE, order="")
    assert own_gpus(joined, GIVEN) == (0, 1, 2)
    assert own_gpus(NODE, {}) == own_gpus(NODE, {"CUDA_VISIBLE_DEVICES": "1"}) == (0, 1, 2)
    assert renamed(LAUNCH, (0, 1, 2)) is LAUNCH


def test_members_of_a_gang_may_open_its_gpus_and_no_others() -> None:
    """A GPU that they may open counts for CUDA, so their own has another number among them."""
    env = {"CUDA_VISIBLE_DEVICES": "2", "SHOAL_JOB_GPUS": "0,2"}
    member = renamed(msgspec.structs.replace(LAUNCH, gpus=(2,), env=env), own_gpus(NODE, GIVEN))
    assert member.env == {"CUDA_VISIBLE_DEVICES": "7", "SHOAL_JOB_GPUS": "2,7"}
    found = {number: Device(f"/dev/x{number}", 195, number) for number in range(8)}
    gone = withheld(member, found)
    assert sorted(gone) == [0, 1, 3, 4, 5, 6]
    assert renumbered(member.env["CUDA_VISIBLE_DEVICES"], found, gone) == "1"
    share = msgspec.structs.replace(member, gpu_milli=500)
    assert sorted(withheld(share, found)) == [0, 1, 2, 3, 4, 5, 6]
