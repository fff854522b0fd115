"""Sleep with NVIDIA's driver: the order of calls, and what happens if one of them is refused.

The driver here is a stand-in with the real one's states, so that this runs without a GPU.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shoal.agent.sleeping import cuda
from shoal.agent.sleeping.cuda import (
    CHECKPOINTED,
    FAILED,
    LOCKED,
    RUNNING,
    Cuda,
    DriverError,
    Nvidia,
    free_mb,
    too_old,
)
from shoal.agent.sleeping.naps import Freeze, described, uses, way_of, why_not
from shoal.agent.sleeping.port import Full, Lost, Refused
from shoal.model.commands import Launch
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from shoal.model.report import Uses

NOT_SUPPORTED, OS_CALL_FAILED = 801, 304
NEXT = {
    "lock": (RUNNING, LOCKED),
    "checkpoint": (LOCKED, CHECKPOINTED),
    "restore": (CHECKPOINTED, LOCKED),
    "unlock": (LOCKED, RUNNING),
}
PLENTY = (1_000_000, "the host")


class Member:
    """Processes that are frozen and thawed by a flag. The driver reaches none that is frozen."""

    def __init__(self, *pids: int) -> None:
        self.alive = list(pids)
        self.frozen = False
        self.calls: list[str] = []
        self.refuses = ""

    def pids(self) -> list[int]:
        return list(self.alive)

    async def freeze(self) -> None:
        if self.refuses:
            raise Refused(self.refuses)
        self.frozen = True
        self.calls.append("freeze")

    async def thaw(self) -> None:
        if self.frozen:
            self.calls.append("thaw")
        self.frozen = False


class Stand:
    """As the driver: a call in the wrong state is an error. `refusals`: by call and process, the
    codes with which its next calls fail."""

    def __init__(self, member: Member, memory: dict[int, int]) -> None:
        self.member = member
        self.memory = {pid: {0: mb} for pid, mb in memory.items()}
        self.free = [10**6]  # the last answer stays
        self.states = dict.fromkeys(memory, RUNNING)
        self.refusals: dict[tuple[str, int], list[int]] = {}
        self.before: Callable[[str, int], None] = lambda name, pid: None

    def why_not(self) -> str:
        return ""

    def memory_mb(self) -> dict[int, dict[int, int]]:
        return {p: mb for p, mb in self.memory.items() if self.states[p] != CHECKPOINTED}

    def free_mb(self) -> dict[int, int]:
        return {0: self.free.pop(0) if len(self.free) > 1 else self.free[0]}

    def state(self, pid: int) -> int:
        if pid not in self.states:
            raise DriverError(3, "initialization error")
        return self.states[pid]

    def lock(self, pid: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        self._call("lock", pid)

    def checkpoint(self, pid: int) -> None:
        self._call("checkpoint", pid)

    def restore(self, pid: int) -> None:
        self._call("restore", pid)

    def unlock(self, pid: int) -> None:
        self._call("unlock", pid)

    def _call(self, name: str, pid: int) -> None:
        self.before(name, pid)
        assert not self.member.frozen
        if codes := self.refusals.get((name, pid)):
            raise DriverError(code := codes.pop(0), f"refused (CUDA error {code})")
        was, becomes = NEXT[name]
        if self.states[pid] != was:
            raise DriverError(401, "illegal state (CUDA error 401)")
        self.states[pid] = becomes
        self.member.calls.append(f"{name} {pid}")


def made(*pids: int, free: tuple[int, str] = PLENTY, **memory: int) -> tuple[Member, Stand, Cuda]:
    """Processes p1, p2, ... have that many MB on a GPU; the others have no context."""
    on_gpus = {int(name[1:]): mb for name, mb in memory.items()}
    member = Member(*pids)
    stand = Stand(member, on_gpus)
    return member, stand, Cuda(stand, lambda _: free)


def run(call: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(call)


def test_a_process_is_locked_and_moved_and_its_tree_frozen_and_waking_is_the_reverse() -> None:
    member, stand, sleeping = made(7, 8, 9, p8=140)
    assert run(sleeping.sleep(member)) == 140
    assert member.calls == ["lock 8", "checkpoint 8", "freeze"]
    member.calls.clear()
    run(sleeping.wake(member, {}))
    assert member.calls == ["thaw", "restore 8", "unlock 8"]
    assert stand.states == {8: RUNNING}


def test_one_that_is_to_be_killed_is_moved_off_its_gpu_and_not_frozen() -> None:
    member, stand, sleeping = made(7, 8, p8=140)
    run(sleeping.sleep(member))
    run(sleeping.wake(member, {}))
    member.calls.clear()
    run(sleeping.leave(member))
    assert member.calls == ["lock 8", "checkpoint 8"]
    assert stand.states == {8: CHECKPOINTED}
    run(sleeping.leave(member))  # there is nothing left to move
    assert len(member.calls) == 2


def test_a_member_without_a_context_is_only_frozen() -> None:
    member, _, sleeping = made(7)
    assert run(sleeping.sleep(member)) == 0
    run(sleeping.wake(member, {0: 0}))
    assert member.calls == ["freeze", "thaw"]


@pytest.mark.parametrize("name", ["lock", "checkpoint"])
def test_whichever_call_is_refused_the_process_runs_again(name: str) -> None:
    member, stand, sleeping = made(7, 8, p7=1)
    stand.refusals[(name, 7)] = [NOT_SUPPORTED]
    with pytest.raises(Refused, match=r"process 7 could not .*refused \(CUDA error 801\)"):
        run(sleeping.sleep(member))
    assert stand.states == {7: RUNNING}
    assert not member.frozen
    assert run(sleeping.sleep(member)) == 1  # as if nothing had been asked


@pytest.mark.parametrize("name", ["lock", "checkpoint"])
@pytest.mark.parametrize("pid", [7, 8, 9])
def test_calls_for_several_processes_are_undone_in_reverse_order(name: str, pid: int) -> None:
    member, stand, _ = made(7, 8, 9, p7=1, p8=1, p9=1)
    stand.refusals[(name, pid)] = [NOT_SUPPORTED]
    with pytest.raises(Refused, match=f"process {pid} could not"):
        cuda.Work(stand, member.pids()).sleep()
    assert set(stand.states.values()) == {RUNNING}
    for done, undone in (("lock", "unlock"), ("checkpoint", "restore")):
        first = [call.split()[1] for call in member.calls if call.startswith(f"{done} ")]
        second = [call.split()[1] for call in member.calls if call.startswith(f"{undone} ")]
        assert first[::-1] == second


def test_processes_that_may_share_gpu_memory_are_not_touched() -> None:
    member, _, sleeping = made(7, 8, p7=1, p8=1)
    with pytest.raises(Refused, match="2 of its processes use GPUs; they may share memory there"):
        run(sleeping.sleep(member))
    assert member.calls == []


def test_a_tree_that_cannot_be_frozen_gets_its_gpu_back() -> None:
    member, stand, sleeping = made(7, p7=1)
    member.refuses = "its processes cannot be frozen"
    with pytest.raises(Refused, match="cannot be frozen"):
        run(sleeping.sleep(member))
    assert member.calls == ["lock 7", "checkpoint 7", "restore 7", "unlock 7"]
    assert stand.states == {7: RUNNING}


def test_a_second_process_on_the_gpu_that_appears_meanwhile_is_a_reason_to_wake_the_first() -> None:
    member, stand, sleeping = made(7, p7=1)

    def a_child_starts(name: str, pid: int) -> None:
        if (name, pid) == ("checkpoint", 7):
            member.alive.append(8)
            stand.memory[8], stand.states[8] = {0: 5}, RUNNING

    stand.before = a_child_starts
    with pytest.raises(Refused, match="2 of its processes use GPUs"):
        run(sleeping.sleep(member))
    assert member.calls[2:] == ["freeze", "thaw", "restore 7", "unlock 7"]
    assert stand.states == {7: RUNNING, 8: RUNNING}


def test_a_process_that_begins_to_use_the_gpu_meanwhile_is_moved() -> None:
    member, stand, sleeping = made(7)
    stand.states[7] = RUNNING
    frozen = member.freeze

    async def freeze() -> None:
        stand.memory[7] = {0: 5}
        await frozen()

    member.freeze = freeze  # type: ignore[method-assign]
    assert run(sleeping.sleep(member)) == 5
    assert member.calls == ["freeze", "thaw", "lock 7", "checkpoint 7", "freeze"]


@pytest.mark.parametrize("whose", ["the host", "its memory limit"])
def test_too_little_host_memory_is_refused_before_anything_is_touched(whose: str) -> None:
    member, _, sleeping = made(7, p7=40_000, free=(30_000, whose))
    with pytest.raises(Refused) as refused:
        run(sleeping.sleep(member))
    assert str(refused.value) == f"it has 40000 MB on GPUs, and {whose} leaves 28000 MB for them"
    assert member.calls == []


def test_a_driver_that_does_not_answer_is_left_alone_and_undoes_its_call_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "CALLS_S_MAX", 0.2)
    member, stand, sleeping = made(7, p7=1)
    answers = threading.Event()

    def hangs(name: str, pid: int) -> None:
        if name == "checkpoint":
            assert answers.wait(60)

    stand.before = hangs

    async def story() -> None:
        with pytest.raises(Refused, match="the driver has not answered for 0 s"):
            await sleeping.sleep(member)
        assert stand.states == {7: LOCKED}
        monkeypatch.setattr(cuda, "CALLS_S_MAX", 60.0)
        answers.set()
        await sleeping.wake(member, {})  # waits until that is over

    run(story())
    assert stand.states == {7: RUNNING}
    assert member.calls == ["lock 7", "checkpoint 7", "restore 7", "unlock 7"]


@pytest.mark.parametrize("state", [LOCKED, CHECKPOINTED])
def test_a_new_agent_wakes_what_the_old_one_left(state: int) -> None:
    member, stand, sleeping = made(7, 8, 9, p8=1)
    stand.states[8] = state  # where the old one was killed
    run(sleeping.wake(member, {}))
    assert stand.states == {8: RUNNING}


def test_waking_waits_for_the_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "AGAIN_S", 0.001)
    member, stand, sleeping = made(7, p7=1_000)
    run(sleeping.sleep(member))
    stand.free = [10, 900, 999, 1_000]
    tried: list[int] = []
    stand.before = lambda name, pid: tried.append(stand.free[0])
    stand.refusals[("restore", 7)] = [OS_CALL_FAILED] * 2  # what a full GPU gave
    run(sleeping.wake(member, {}))
    assert tried == [1_000] * 4  # three restores, and unlock: none before there was room
    assert stand.states == {7: RUNNING}


def test_a_process_whose_gpu_somebody_else_fills_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "ROOM_S", 0.0)
    member, stand, sleeping = made(7, p7=11_204)
    run(sleeping.sleep(member))
    before = list(member.calls)
    stand.free = [5_413]
    for _ in range(3):
        with pytest.raises(Full) as full:
            run(sleeping.wake(member, {}))
        assert str(full.value) == "GPU 0 has 5413 MB free, and it needs 11204 MB"
        assert stand.states == {7: CHECKPOINTED}
    assert "restore 7" not in member.calls[len(before) :], "nothing was risked"
    stand.free = [11_204]
    run(sleeping.wake(member, {}))
    assert stand.states == {7: RUNNING}


def test_a_process_that_cannot_be_restored_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "REST_S", 0.0)
    member, stand, sleeping = made(7, p7=1_000)
    run(sleeping.sleep(member))
    stand.free, stand.refusals[("restore", 7)] = [10**6], [NOT_SUPPORTED] * 10**4
    why = "CUDA error 801"
    with pytest.raises(Lost, match=f"process 7 could not be moved back to its GPU: .*{why}"):
        run(sleeping.wake(member, {}))
    stand.states[7] = FAILED
    with pytest.raises(Lost, match="the driver has lost what process 7 had on its GPU"):
        run(sleeping.wake(member, {}))


def test_processes_that_were_not_moved_are_left_alone() -> None:
    member, stand, sleeping = made(7, 8, p7=1)
    run(sleeping.sleep(member))
    asked: list[int] = []
    state = stand.state
    stand.state = lambda pid: asked.append(pid) or state(pid)  # type: ignore[method-assign,func-returns-value]
    run(sleeping.wake(member, {}))
    assert set(asked) == {7}


def test_other_gpus_are_not_tried() -> None:
    member, _, sleeping = made(7, p7=1)
    run(sleeping.sleep(member))
    with pytest.raises(Lost, match="only on the GPUs that it had"):
        run(sleeping.wake(member, {0: 1}))


def test_an_old_driver_and_a_machine_without_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert too_old(12_040, "driver 550.54") == (
        "driver 550.54 has CUDA 12.4, and sleep needs CUDA 12.8 (driver 570) or newer"
    )
    monkeypatch.setattr("shoal.agent.sleeping.cuda.LIBRARY", "libnone.so.1")
    assert Cuda(Nvidia()).why_not() == "this machine has no NVIDIA driver (libnone.so.1)"


def test_the_tightest_cgroup_limits_what_can_be_moved(tmp_path: Path) -> None:
    proc, top = tmp_path / "proc", tmp_path / "cgroup"
    group = top / "node/member"
    for folder in (proc / "self", proc / "7", group):
        folder.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 20480000 kB\n")
    (proc / "self/mountinfo").write_text(f"1 2 0:1 / {top} rw - cgroup2 cgroup2 rw\n")
    (proc / "7/cgroup").write_text("0::/node/member\n")
    assert free_mb([7], proc) == (20_000, "the host")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("0\n")
    (group.parent / "memory.max").write_text(str(8_000 << 20))
    (group.parent / "memory.current").write_text(str(5_000 << 20))
    (group.parent / "memory.stat").write_text(f"anon 1\ninactive_file {1_000 << 20}\n")
    assert free_mb([7], proc) == (4_000, "its memory limit")
    assert free_mb([8], proc) == (20_000, "the host")  # it has ended


def test_only_a_node_with_real_gpus_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.agent.sleeping.cuda.LIBRARY", "libnone.so.1")
    node, bare = (NodeSpec(id="n1", cpu_milli=1, memory_mb=1, gpus=gpus) for gpus in (1, 0))
    assert [way_of(node, real=real).name for real in (True, False)] == ["cuda", "freeze"]
    assert way_of(bare, real=True).name == "freeze"
    told = described(node, way_of(node, real=True))
    why = "this machine has no NVIDIA driver (libnone.so.1)"
    assert (told.sleep, told.sleep_why, told.remaps) == ("", why, False)


def test_a_gang_on_real_gpus_is_refused_and_a_single_member_is_not() -> None:
    def launch(members: int, *gpus: int) -> Launch:
        return Launch(
            node="n1",
            incarnation=1,
            ref=MemberRef("j1", 1, 0),
            argv=("train",),
            env={"WORLD_SIZE": str(members)},
            workdir="/",
            stop_grace_ms=0,
            gpus=gpus,
        )

    driver = Cuda(Stand(Member(), {}))
    assert "one of a gang on GPUs" in why_not(driver, launch(2, 0))
    assert [why_not(driver, launch(1, 0, 1)), why_not(driver, launch(2))] == ["", ""]
    assert why_not(Freeze(), launch(2, 0)) == ""


def test_members_report_their_gpu_memory_in_whole_gb() -> None:
    one, two, gone = MemberRef("j1", 1, 0), MemberRef("j2", 1, 0), MemberRef("j0", 1, 0)
    owners = {7: one, 8: one, 9: two, 10: gone}
    usage = {0: {7: 1_500, 9: 20, 10: 5, 11: 5}, 1: {7: 400, 8: 200}}
    assert uses(usage, owners.get, {one, two}) == (Uses(one, 3_000), Uses(two, 1_000))


GO_ON = """
import ctypes, itertools, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context, place, number = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int()
assert not cuda.cuInit(0) and not cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
assert not cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(1 << 28))
for step in itertools.count():
    assert not cuda.cuMemcpyHtoD_v2(place, ctypes.byref(ctypes.c_int(step)), 4)
    assert not cuda.cuMemcpyDtoH_v2(ctypes.byref(number), place, 4)
    print(number.value, flush=True)
    time.sleep(0.01)
"""


def test_on_a_real_gpu_a_process_goes_on_where_it_was() -> None:
    if why := Nvidia().why_not():
        pytest.skip(f"needs an NVIDIA GPU: {why}")
    process = subprocess.Popen([sys.executable, "-c", GO_ON], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0\n"
        member, sleeping = Member(process.pid), Cuda()
        assert run(sleeping.sleep(member)) >= 256
        assert process.pid not in Nvidia().memory_mb()
        run(sleeping.wake(member, {}))
        for step in range(1, 200):
            assert process.stdout.readline() == b"%d\n" % step
    finally:
        process.kill()
        process.communicate()
