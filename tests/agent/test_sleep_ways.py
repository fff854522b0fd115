"""How members are stopped: by the kernel's freezer, by signals, in containers, without rights."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.waiting import until

from shoal.agent.member import Member, State
from shoal.agent.members import Members
from shoal.agent.ownership import read_process
from shoal.agent.sleeping import naps
from shoal.agent.sleeping.naps import Naps, Tree
from shoal.agent.sleeping.port import Full, Lost, Processes, Refused
from shoal.core.nodebook import NodeBook
from shoal.machine.cgroups import UNIFIED, Group
from shoal.model.commands import Envelope, Launch, Sleep, Stop, Wake
from shoal.model.job import Fault, MemberRef
from shoal.model.node import NodeSpec
from tests.agent.rig import rig, rig_of
from tests.agent.test_sleep import fall_asleep, is_awake, sleep, still, tree, wake
from tests.needs import need_root
from tests.podman import IMAGE, podman

REF = MemberRef("j1", 1, 0)
USER, OTHER = 65_534, 64_321
# Processes come and go in a session of their own, beside one that stays.
HASHES = """
last=begin n=0
while [ $n -lt 60 ]; do
    last=$(printf %s $last | setsid --wait sha256sum | cut -c1-64)
    echo $last
    n=$((n+1))
done
"""


def hashes() -> bytes:
    last, text = b"begin", b""
    for _ in range(60):
        last = hashlib.sha256(last).hexdigest().encode()
        text += last + b"\n"
    return text


def state(pid: int) -> str:
    seen = read_process(pid)
    return seen.state if seen is not None else ""


@pytest.fixture
def group() -> Iterator[Group]:
    """Of version 2, wherever that is mounted."""
    need_root()
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    tops = [words[1] for words in lines if words[2] == "cgroup2"]
    if not tops:
        pytest.skip("needs cgroups of version 2: mount -t cgroup2 none /sys/fs/cgroup/unified")
    folder = tempfile.mkdtemp(prefix="shoal-test-", dir=tops[0])
    made = Group("test", {UNIFIED: folder}, [], unified=True)
    try:
        yield made
    finally:
        made.kill()
        until(made.remove)


def test_the_kernel_freezes_a_group_unseen_and_what_is_frozen_can_be_killed(group: Group) -> None:
    script = "import os, time\ninput()\nos.fork()\nwhile True: time.sleep(0.01)"
    child = subprocess.Popen(
        [sys.executable, "-c", script], start_new_session=True, stdin=subprocess.PIPE
    )
    group.add(child.pid)
    assert child.stdin is not None
    child.stdin.write(b"\n")  # it forks when it is in the group, never before
    child.stdin.close()
    process = SimpleNamespace(pid=child.pid, group=group)
    known: Any = SimpleNamespace(
        containers={},
        get=lambda _: process,
        all_of=lambda _: {child.pid, *group.pids()},
        owner=lambda _: None,
    )
    member = Tree(known, REF)

    async def scene() -> None:
        await member.freeze()
        assert group.frozen and len(list(group.pids())) == 2
        assert not any(state(pid) == "T" for pid in group.pids()), "no process sees a signal"
        await member.thaw()
        until(lambda: not group.frozen)
        await member.freeze()
        for pid in list(group.pids()):
            os.kill(pid, signal.SIGKILL)
        child.wait(120)
        until(lambda: group.empty)

    until(lambda: len(list(group.pids())) == 2)
    asyncio.run(scene())


def test_without_groups_and_rights_members_sleep_and_a_foreign_process_is_a_refusal() -> None:
    """The agent is an ordinary user's, and the job starts a process of another user."""
    need_root()
    folder = Path(tempfile.mkdtemp(prefix="shoal-foreign-"))
    folder.chmod(0o755)
    foreign = folder / "foreign"
    shutil.copy(shutil.which("setpriv") or "setpriv", foreign)
    foreign.chmod(0o4755)
    other = MemberRef("j2", 1, 0)
    try:
        with rig_of(USER, {}) as node:
            node.launch(REF, "sh", "-c", HASHES)
            node.until(lambda: node.text(REF).count("\n") >= 3)
            fall_asleep(node)
            until(lambda: still(node))
            wake(node)
            node.until(lambda: is_awake(node))
            words = f"{foreign} --reuid={OTHER} --clear-groups sleep 600 & echo $!; wait"
            node.launch(other, "sh", "-c", words)
            node.says(other, "\n")
            pid = int(node.text(other))
            node.wait(lambda: os.stat(f"/proc/{pid}").st_uid == OTHER)
            sleep(node, other)
            node.until(lambda: bool(node.report and node.report.refused))
            assert node.report is not None
            (refusal,) = node.report.refused
            assert refusal.ref == other and "belongs to another user" in refusal.why
            assert "T" not in tree(node).values()
            os.kill(pid, signal.SIGKILL)
            assert node.exit(other).code == 0
            assert node.exit(REF).code == 0
            assert node.text(REF).encode() == hashes()
    finally:
        shutil.rmtree(folder)


def test_a_container_sleeps_with_all_that_is_in_it_and_can_be_stopped_and_killed() -> None:
    counts = (
        "trap 'echo bye; exit 7' TERM; (n=0; while :; do n=$((n+1)); echo $n; sleep 0.02; done) & "
    )
    with podman() as store, rig(**store.env) as node:
        for ref in (REF, MemberRef("j2", 1, 0)):
            node.launch(ref, "sh", "-c", counts + "while :; do wait; done", image=IMAGE)
            node.says(ref, "2\n")
            fall_asleep(node, ref)
            inside = node.directory / "members" / str(ref) / "output"
            before = inside.read_text()
            wake(node, ref)
            node.until(lambda ref=ref: is_awake(node, ref))  # type: ignore[misc]
            node.until(lambda: len(inside.read_text()) > len(before))  # noqa: B023
            fall_asleep(node, ref)
        node.stop(REF, grace_ms=30_000)
        assert node.exit(REF).code == 7 and "bye" in node.text(REF)
        (file,) = (node.directory / "containers").glob("*-j2.1.0/pid")
        os.kill(int(file.read_text()), signal.SIGKILL)
        assert node.exit(MemberRef("j2", 1, 0)).code == 128 + signal.SIGKILL


# -- ways that fail ----------------------------------------------------------------------------


class Way:
    """Does as it is told; `None` never ends."""

    name = "cuda"

    def __init__(self, sleep: int | Exception | None, wake: Exception | None = None) -> None:
        self._sleep, self._wake = sleep, wake
        self.calls: list[str] = []

    def why_not(self) -> str:
        return ""

    async def sleep(self, processes: Processes) -> int:
        self.calls.append("sleep")
        if self._sleep is None:
            await asyncio.Event().wait()
        if isinstance(self._sleep, Exception):
            raise self._sleep
        return self._sleep or 0

    async def wake(self, processes: Processes, gpus: Mapping[int, int]) -> None:
        self.calls.append(f"wake {dict(gpus)}")
        if self._wake is not None:
            raise self._wake

    async def leave(self, processes: Processes) -> None:
        self.calls.append("leave")


class Scene:
    """A member with GPU 0 of a node, as the agent keeps it."""

    def __init__(self, way: Way) -> None:
        self.book = NodeBook(NodeSpec(id="n1", gpus=2, cpu_milli=1_000, memory_mb=1_000), 1)
        self.member = Member(REF, State.RUNNING)
        self.signals: list[int] = []
        self.way, self.killed = way, asyncio.Event()

        def signaled(_: MemberRef, number: int) -> None:
            self.signals.append(number)
            way.calls.append(signal.Signals(number).name)
            if number == signal.SIGKILL:
                self.killed.set()

        processes: Any = SimpleNamespace(get=lambda _: None, signal=signaled, containers={})
        self.processes = processes
        watch: Any = SimpleNamespace(
            rests=lambda _: None, expect=lambda _: None, woke=lambda _: None
        )
        self.naps = Naps(processes, self.book, {REF: self.member}, watch, watch, lambda: None)
        self.naps.way = way
        order = Launch(
            node="n1",
            incarnation=1,
            ref=REF,
            argv=("x",),
            env={},
            workdir="",
            stop_grace_ms=1,
            gpus=(0,),
        )
        self.take(order)

    def take(self, command: Launch | Sleep | Wake) -> None:
        stamp = self.book._newest[1] + 1
        for action in self.book.take(Envelope(1, stamp, (command,))):
            if isinstance(action, Sleep):
                self.naps.sleep(action)
            elif isinstance(action, Wake):
                self.naps.wake(action)

    async def nap(self, *, gpus: tuple[int, ...] = ()) -> None:
        self.take(Sleep(node="n1", incarnation=1, ref=REF))
        await self.settle()
        if gpus:
            self.take(Wake(node="n1", incarnation=1, ref=REF, gpus=gpus))
            await self.settle()

    async def settle(self) -> None:
        if self.member.task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self.member.task


def test_a_member_that_cannot_be_woken_is_killed_and_its_node_is_to_blame() -> None:
    async def run() -> None:
        scene = Scene(Way(500, Lost("the driver has failed")))
        await scene.nap(gpus=(1,))
        assert scene.signals == [signal.SIGKILL] and scene.member.fault is Fault.WAKE
        assert scene.member.why == "it could not be woken: the driver has failed"

    asyncio.run(run())


def test_a_member_whose_gpu_is_full_sleeps_on_and_is_not_killed() -> None:
    async def run() -> None:
        scene = Scene(Way(500, Full("GPU 0 has 10 MB free, and it needs 500 MB")))
        for _ in range(2):
            await scene.nap(gpus=(0,))
            assert scene.member.state is State.ASLEEP and not scene.signals
            assert scene.book.asleep[REF].memory_mb == 500
            assert scene.book.refused[REF].why == "GPU 0 has 10 MB free, and it needs 500 MB"
        scene.naps.way._wake = None  # type: ignore[attr-defined]
        await scene.nap(gpus=(0,))
        assert scene.member.state is State.RUNNING and REF not in scene.book.refused

    asyncio.run(run())


def test_a_refusal_leaves_a_member_that_runs_and_can_be_asked_again_after_a_wake_up() -> None:
    async def run() -> None:
        scene = Scene(Way(Refused("it shares memory")))
        await scene.nap()
        assert scene.member.state is State.RUNNING and not scene.signals
        assert scene.book.refused[REF].why == "it shares memory"
        await scene.nap()
        assert scene.naps.way.calls == ["sleep"]  # type: ignore[attr-defined]
        scene.take(Wake(node="n1", incarnation=1, ref=REF, gpus=(0,)))
        scene.take(Sleep(node="n1", incarnation=1, ref=REF))
        await scene.settle()
        assert scene.naps.way.calls == ["sleep", "sleep"]  # type: ignore[attr-defined]

    asyncio.run(run())


def test_one_that_takes_too_long_or_fails_in_between_is_woken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(naps, "SLEEP_S_MAX", 0.01)

    async def run() -> None:
        for problem in (None, RuntimeError("a bug")):
            scene = Scene(Way(problem))
            await scene.nap()
            assert scene.naps.way.calls == ["sleep", "wake {}"]  # type: ignore[attr-defined]
            assert scene.member.state is State.RUNNING and REF in scene.book.refused

    asyncio.run(run())


def test_one_whose_gpu_state_is_elsewhere_is_not_asked_to_end_and_is_told_its_new_gpus() -> None:
    async def run() -> None:
        for moved_mb, obeys in ((500, False), (0, True)):
            scene = Scene(Way(moved_mb))
            await scene.nap(gpus=(1,))
            assert scene.naps.way.calls == ["sleep", "wake {0: 1}"]  # type: ignore[attr-defined]
            assert scene.member.state is State.RUNNING and scene.book.woke[REF].took_ms >= 0
            await scene.nap()
            assert scene.naps.stop(scene.member) is obeys

    asyncio.run(run())


class Stopper(Members):
    """As far as it ends members."""

    def __init__(self, scene: Scene) -> None:
        self.naps, self.processes = scene.naps, scene.processes


@pytest.mark.parametrize(
    ("naps_mb", "catches", "order"),
    [
        (500, False, ["leave", "SIGTERM", "SIGCONT", "SIGKILL"]),
        (500, True, ["SIGTERM", "SIGCONT", "leave", "SIGKILL"]),
        (0, False, ["SIGTERM", "SIGCONT", "SIGKILL"]),
    ],
)
def test_what_was_brought_back_to_its_gpu_is_moved_off_it_before_it_is_killed(
    naps_mb: int, catches: bool, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To kill it there hung a host. One that catches SIGTERM first gets its time to save."""
    monkeypatch.setattr(Naps, "deaf", lambda *_: not catches)

    async def run() -> None:
        scene = Scene(Way(naps_mb))
        await scene.nap(gpus=(0,))
        scene.way.calls.clear()
        stop = Stop(node="n1", incarnation=1, ref=REF, grace_ms=0, why="")
        Stopper(scene)._terminate(scene.member, stop)
        await scene.killed.wait()
        assert scene.way.calls == order

    asyncio.run(run())


def test_a_process_says_which_signals_it_catches() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert naps._catches(os.getpid(), signal.SIGUSR2)
        assert not naps._catches(os.getpid(), signal.SIGSTOP)
        assert not naps._catches(2**22, signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
