"""The supervisor: it outlives a full disk, and `up` brings it back when it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.mounts import read_only
from harness.waiting import until

from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.machine.files import held
from tests.live.cluster import Live, virtual_nodes


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    home.create()
    home.write_config(ClusterConfig(nodes=virtual_nodes(1, 1), port=0))
    yield home
    take_down(home, lambda _: None)


def supervisor_pid(home: Home) -> int:
    return int(home.supervisor_lock.read_text())


def was_forked(home: Home, pid: int) -> bool:
    """By the supervisor, without an exec: that would have laid out the memory again."""
    auxiliary = [Path(f"/proc/{one}/auxv").read_bytes() for one in (supervisor_pid(home), pid)]
    return auxiliary[0] == auxiliary[1]


def test_controllers_and_agents_are_forks_of_it_and_without_it_agents_are_executed(
    home: Home,
) -> None:
    bring_up(home, None, lambda _: None)
    live = Live(home)
    assert was_forked(home, live.controller_pid())
    last = live.kill_controller()
    until(lambda: live.controller_pid() != last)
    assert was_forked(home, live.controller_pid())
    agent = live.agent_pid("n1")
    assert was_forked(home, agent)
    live.kill_agent("n1")
    until(lambda: live.agent_pid("n1") != agent)
    agent = live.agent_pid("n1")
    assert was_forked(home, agent)

    before = Path(f"/proc/{agent}/auxv").read_bytes()
    os.kill(supervisor_pid(home), signal.SIGKILL)
    until(lambda: not held(home.supervisor_lock))
    live.kill_agent("n1")
    until(lambda: live.agent_pid("n1") != agent)
    assert Path(f"/proc/{live.agent_pid('n1')}/auxv").read_bytes() != before
    live.client.close()


def test_it_outlives_a_full_log_and_is_brought_back_when_it_is_killed(home: Home) -> None:
    with open("/dev/full", "wb") as full:
        words = [sys.executable, "-m", "shoal.control.supervise", str(home.path)]
        subprocess.run(words, stdout=full, stderr=full, cwd="/", check=True)
    until(lambda: held(home.supervisor_lock))
    bring_up(home, None, lambda _: None)
    live = Live(home)
    job = live.run("sleep 600", gpus=1)
    assert live.wait(job, "running") == "running"
    for _ in range(2):
        last = live.kill_controller()
        until(lambda last=last: live.controller_pid() != last)  # type: ignore[misc]
    assert live.client.job(job).state == "running", "the supervisor lives, though it cannot log"

    os.kill(supervisor_pid(home), signal.SIGKILL)
    until(lambda: not held(home.supervisor_lock))
    until(lambda: "the supervisor has died" in str(live.client.status().alarms))
    assert bring_up(home, None, lambda _: None).already is True
    assert held(home.supervisor_lock)
    last = live.kill_controller()
    until(lambda: live.controller_pid() != last, "somebody looks after it again")
    view = live.client.job(job)
    assert (view.state, view.attempt) == ("running", 1)
    live.client.close()


def test_down_ends_everything_on_a_disk_that_cannot_be_written(home: Home) -> None:
    bring_up(home, None, lambda _: None)
    live = Live(home)
    live.client.close()
    notes: list[str] = []
    with read_only(home.path):
        assert take_down(home, lambda _: None, notes.append) == 2
        until(lambda: not live.processes())
    assert [note.partition(":")[0] for note in notes] == [
        f"cannot remove {home.address}",
        f"cannot remove {home.socket}",
    ]
