"""A member that hangs is looked at, told, and ended within its time."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

from shoal.agent import stacks as stacks_module
from shoal.agent.stacks import DUMP_BYTES_MAX, INSTALL, find_py_spy, from_proc, in_one_line, stacks
from shoal.model.job import MemberRef
from tests.agent.rig import Rig, rig

REF = MemberRef("j1", 1, 0)

needs_py_spy = pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")

HANGS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def waits_for_ever():
    print("hangs")
    while True:
        time.sleep(600)
def trains():
    waits_for_ever()
trains()
"""

GLOO = """
import os, signal, sys
import torch, torch.distributed as dist
def unheard(*_): print("never comes here")
signal.signal(signal.SIGTERM, unheard)
store = dist.FileStore(os.environ["STORE"], 2)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
print("joined", flush=True)
def reduces():
    dist.all_reduce(torch.ones(1))
if sys.argv[1] == "0":
    reduces()
else:
    signal.pause()
"""


def pid_of(node: Rig, ref: MemberRef) -> int:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
                stat = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            mark = f"SHOAL_REF={ref}\0".encode()
            home = b"SHOAL_NODE_DIR=" + os.fsencode(node.directory) + b"\0"
            if mark in environ and home in environ:
                fields = stat.rpartition(")")[2].split()
                if fields[3] == name:  # the leader of its session
                    return int(name)
    raise AssertionError("no such process")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@needs_py_spy
@pytest.mark.parametrize("stopped", [False, True])
def test_the_stack_of_a_member_that_hangs_is_saved_before_it_is_killed(
    stopped: bool, tmp_path: Path
) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    with rig() as node:
        node.launch(REF, sys.executable, str(script))
        node.says(REF, "hangs")
        if stopped:
            pid = pid_of(node, REF)
            os.kill(pid, signal.SIGSTOP)
            node.until(lambda: state_of(pid) == "T")
        node.stop(REF, grace_ms=200, dump=True)
        ended = node.exit(REF)
        assert (ended.code, ended.stopped) == (128 + signal.SIGKILL, True)
        assert "was in waits_for_ever" in ended.why
        assert "hangs.py:7) < trains (" in ended.why
        text = node.text(REF)
        assert "stopped by Shoal (a test wants it); its stacks:" in text
        assert "trains (" in text


@pytest.mark.outside("a real collective of torch over gloo")
@needs_py_spy
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_member_that_waits_in_a_collective_is_killed_when_its_grace_is_over(
    tmp_path: Path,
) -> None:
    """It has a handler for SIGTERM that can never run, for its main thread waits in C++."""
    script = tmp_path / "gloo.py"
    script.write_text(GLOO)
    env = {"STORE": str(tmp_path / "store")}
    other = MemberRef("j1", 1, 1)
    with rig() as node:
        node.launch(REF, sys.executable, str(script), "0", env=env)
        node.launch(other, sys.executable, str(script), "1", env=env)
        node.says(REF, "joined")
        node.says(other, "joined")
        node.stop(REF, grace_ms=300, dump=True)
        ended = node.exit(REF)
        assert ended.code == 128 + signal.SIGKILL
        assert "reduces (" in ended.why
        assert "all_reduce" in ended.why
        assert "never comes here" not in node.text(REF)
        node.stop(other, grace_ms=300)
        node.exit(other)


def test_a_member_that_was_stopped_by_a_signal_ends_all_the_same(tmp_path: Path) -> None:
    with rig() as node:
        node.launch(REF, "sh", "-c", "trap '' TERM; echo hangs; while :; do sleep 600; done")
        node.says(REF, "hangs")
        os.killpg(pid_of(node, REF), signal.SIGSTOP)
        node.stop(REF, grace_ms=200)
        assert node.exit(REF).code == 128 + signal.SIGKILL


def test_without_py_spy_the_kernel_is_asked_and_the_user_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacks_module, "find_py_spy", lambda: None)
    text, why = stacks(os.getpid(), {})
    assert f"Process {os.getpid()}" in text
    assert "state R" in text
    assert text.endswith(INSTALL)
    assert "no Python stack" in why


def test_a_dump_ends_in_time_whatever_py_spy_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr(stacks_module, "find_py_spy", lambda: str(slow))
    monkeypatch.setattr(stacks_module, "DUMP_S_MAX", 0.3)
    text, _ = stacks(os.getpid(), {})
    assert "state R" in text


def test_a_dump_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wordy = tmp_path / "py-spy"
    wordy.write_text(
        "#!/bin/sh\necho 'Process 7: x'; echo 'Thread 7 (idle)'\n"
        'i=0; while [ $i -lt 2000 ]; do echo "    frame$i (file.py:$i)"; i=$((i+1)); done\n'
    )
    wordy.chmod(0o755)
    monkeypatch.setattr(stacks_module, "find_py_spy", lambda: str(wordy))
    text, why = stacks(os.getpid(), {})
    assert len(text.encode()) == DUMP_BYTES_MAX
    assert why.startswith("was in frame0 (file.py:0) < frame1")
    assert len(why) < 1000


def test_a_process_that_is_gone_is_told_so() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert from_proc(child) == f"Process {child} is gone"
    assert in_one_line([from_proc(child)]) == ""


def test_the_main_thread_is_the_one_told_of() -> None:
    dump = """Process 40: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 41 (active): "worker"
    loads (data.py:3)
Thread 40 (idle): "MainThread"
    all_reduce (torch/distributed.py:9)
    <module> (train.py:1)
"""
    wanted = "was in all_reduce (torch/distributed.py:9) < <module> (train.py:1)"
    assert in_one_line([dump]) == wanted
    assert in_one_line(["Process 3: sh", dump.replace(': "MainThread"', "")]) == wanted
