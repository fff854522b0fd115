"""What a member may use is held by the kernel: memory, processes, CPU; and nothing outlives it."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.machine.cgroups import (
    Ceiling,
    Cgroups,
    Group,
    Mount,
    Setting,
    end_groups,
    mounts,
    place,
    settings,
)
from shoal.model.commands import Limits
from shoal.model.job import Fault, MemberRef
from tests.agent.rig import Rig, rig
from tests.needs import need_cgroups

MEMORY = "import sys; sys.stdout.write(str(len(bytearray(300 << 20))))"
FORKS = """
import os, sys, time
for _ in range(100):
    if os.fork() == 0:
        time.sleep(1000)
"""
HIDES = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", "1000"], {})
        os._exit(0)
    os.wait()
time.sleep(0.2)
"""
THREAD_AND_CHILD = """
import os, sys, threading, time
for entrance in sys.argv[1:]:
    with open(entrance, "w") as file:
        file.write("0")
child = os.fork()
if child == 0:
    time.sleep(1000)
threading.Thread(target=time.sleep, args=(1000,)).start()
print(child, flush=True)
"""


def test_a_ceiling_becomes_the_settings_of_either_version() -> None:
    ceiling = Ceiling(512, 1500, True, 64, ((195, 2),))
    assert settings(ceiling, unified=False) == [
        Setting("memory", "memory.limit_in_bytes", "536870912"),
        Setting("memory", "memory.memsw.limit_in_bytes", "536870912", needed=False),
        Setting("pids", "pids.max", "64"),
        Setting("cpu", "cpu.shares", "1536"),
        Setting("cpu", "cpu.cfs_quota_us", "150000"),
        Setting("devices", "devices.deny", "c 195:2 rwm"),
    ]
    assert settings(ceiling, unified=True) == [
        Setting("memory", "memory.max", "536870912"),
        Setting("memory", "memory.swap.max", "0", needed=False),
        Setting("memory", "memory.oom.group", "1", needed=False),
        Setting("pids", "pids.max", "64"),
        Setting("cpu", "cpu.weight", "150"),
        Setting("cpu", "cpu.max", "150000 100000"),
    ]


def test_a_ceiling_of_nothing_sets_nothing() -> None:
    assert settings(Ceiling(), unified=False) == settings(Ceiling(), unified=True) == []


def test_weights_stay_within_what_the_kernel_takes() -> None:
    assert settings(Ceiling(cpu_milli=1), unified=True)[0].value == "1"
    assert settings(Ceiling(cpu_milli=10_000_000), unified=False)[0].value == "262144"


def test_groups_are_found_where_they_are_mounted() -> None:
    info = """\
34 33 0:31 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
37 33 0:34 /box /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
43 33 0:40 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
44 33 0:41 / /proc rw - proc proc rw
"""
    own = "3:cpu,cpuacct:/box/a\n2:memory:/box/a\n0::/user.slice\n"
    found = mounts(info, own)
    assert found == [
        Mount(frozenset({"cpu", "cpuacct"}), "/sys/fs/cgroup/cpu,cpuacct", "/box/a"),
        Mount(frozenset({"memory"}), "/sys/fs/cgroup/memory", "/a"),
        Mount(frozenset(), "/sys/fs/cgroup/unified", "/user.slice"),
    ]
    assert place(found) == "", "a container engine takes one path for all hierarchies"
    assert place(mounts(info.replace("/box", "/"), own)) == "/box/a"


def test_an_ordinary_user_gets_reasons_and_no_groups(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        groups = Cgroups.open(tmp_path, 4000)
        told = f"{bool(groups)} {groups.make('j1.1.0', Ceiling(64))} {groups.missing['memory']}"
        os.write(write, told.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000) == b"False None no writable cgroup"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("itself", [True, False], ids=["joins", "is added"])
def test_a_process_is_in_its_groups_with_all_threads_and_children(
    tmp_path: Path, itself: bool
) -> None:
    need_cgroups()
    groups = Cgroups.open(tmp_path, 0)
    group = groups.make("j1.1.0", Ceiling(64))
    assert group is not None
    entrances = group.entrances if itself else []
    process = subprocess.Popen(
        [sys.executable, "-c", THREAD_AND_CHILD, *entrances],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        inside = [process.pid, child]
        if not itself:
            for pid in inside:
                group.add(pid)
        threads = sorted(int(name) for pid in inside for name in os.listdir(f"/proc/{pid}/task"))
        assert len(threads) == 3
        assert sorted(group.pids()) == sorted(inside)
        file = "cgroup.threads" if groups.unified else "tasks"
        for folder in group.folders:
            assert sorted(map(int, Path(folder, file).read_text().split())) == threads
    finally:
        groups.close()
        with contextlib.suppress(ProcessLookupError):  # both have ended, unless they were outside
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def node() -> Iterator[Rig]:
    need_cgroups()
    with rig() as made:
        yield made


def test_a_member_that_uses_more_memory_than_it_asked_for_is_ended(node: Rig) -> None:
    ref = MemberRef("j1", 1, 0)
    node.launch(ref, sys.executable, "-c", MEMORY, memory_mb=64)
    exit_ = node.exit(ref)
    assert exit_.code == 128 + signal.SIGKILL
    assert exit_.why == "it used more than its 64 MB of memory and was ended (memory)"
    assert exit_.fault is Fault.NONE, "the node is well: the job asked for too little"
    assert exit_.why.encode() in node.output[ref]


def test_a_member_that_starts_too_many_processes_is_told_so_and_leaves_none(node: Rig) -> None:
    ref = MemberRef("j1", 1, 0)
    node.launch(ref, sys.executable, "-c", FORKS, limits=Limits(processes=20))
    exit_ = node.exit(ref)
    assert exit_.code == 1
    assert exit_.why == "it wanted more than its 20 processes and threads (processes)"
    assert b"Resource temporarily unavailable" in node.output[ref]
    _gone(node)


def test_processes_that_hide_in_sessions_of_their_own_end_with_their_member(node: Rig) -> None:
    ref = MemberRef("j1", 1, 0)
    node.launch(ref, sys.executable, "-c", HIDES)
    assert node.exit(ref).code == 0
    _gone(node)


def test_a_dead_agents_groups_and_what_is_in_them_are_cleared(tmp_path: Path) -> None:
    need_cgroups()
    groups = Cgroups.open(tmp_path, 0)
    group = groups.make("j1.1.0", Ceiling(64, 500, False, 10))
    assert group is not None
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    group.add(child)
    end_groups(tmp_path)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not any(Path(entrance).exists() for entrance in group.entrances)


def test_a_group_without_a_trace_of_a_member_is_the_next_ones(tmp_path: Path) -> None:
    """One with a process in it, a group of its own, or something that was refused is not."""
    need_cgroups()
    groups = Cgroups.open(tmp_path, 0)
    if groups.unified:
        assert not _plain(groups, 10).kind, "each member has a new group in version 2"
        groups.close()
        return
    try:
        first = _plain(groups, 10)
        groups.discard(first, used=False)
        second = _plain(groups, 20)
        assert second is first
        (pids,) = (folder for folder in first.folders if "/pids/" in folder)
        assert Path(pids, "pids.max").read_text() == "20\n", "with its own limits"
        child = subprocess.Popen(["sleep", "600"])
        second.add(child.pid)
        groups.discard(second, used=False)
        assert child.wait() == -signal.SIGKILL
        third = _plain(groups, 1)
        assert third is not second
        Path(pids := next(one for one in third.folders if "/pids/" in one), "inner").mkdir()
        groups.discard(third, used=False)
        assert not Path(pids).exists(), "somebody made a group in it"
        fourth = _plain(groups, 1)
        words = f"echo 0 > {fourth.entrances[-1]}; /bin/true; true"
        assert subprocess.run(["/bin/sh", "-c", words], stderr=subprocess.DEVNULL).returncode
        groups.discard(fourth, used=False)
        assert _plain(groups, 1) is not fourth
    finally:
        groups.close()
    assert not any(Path(folder).parent.exists() for folder in first.folders)


def _plain(groups: Cgroups, processes: int) -> Group:
    made = groups.make("j1.1.0", Ceiling(cpu_milli=500, processes=processes))
    assert made is not None
    return made


def _gone(node: Rig) -> None:
    """No process is left in any group of the node."""
    name = Cgroups.open(node.directory, 0).name
    left = f"/sys/fs/cgroup/**{name}/*/cgroup.procs"
    assert node.until(lambda: not any(map(_inside, glob.glob(left, recursive=True))))


def _inside(file: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(file).read_text()
    return ""
