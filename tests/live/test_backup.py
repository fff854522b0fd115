"""A working cluster is saved, its head is lost, and it comes back from the backup."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from harness.waiting import until

from shoal.client import ShoalError
from shoal.control.backup.manifest import verify
from shoal.control.backup.restoring import restore
from shoal.control.backup.saving import save
from shoal.control.lifecycle import is_up
from shoal.core.state.events.cluster import ClusterRestored
from tests.live.cluster import live_cluster


def test_a_head_that_lost_its_disk_comes_back_and_what_started_later_is_stopped(
    tmp_path: Path,
) -> None:
    quiet = lambda *_: None  # noqa: E731
    with live_cluster(nodes=2, gpus=2) as live:
        done = live.run("echo one")
        assert live.wait(done) == "succeeded"
        old = live.run("sleep 600", gpus=1)
        assert live.wait(old, "running") == "running"
        save(live.home, tmp_path / "b.tar", (), quiet)
        later = live.run("sleep 600", gpus=1)
        assert live.wait(later, "running") == "running"
        before = live.member_processes()

        supervisor = int(live.home.supervisor_lock.read_text())
        os.kill(supervisor, signal.SIGKILL)
        live.kill_controller()
        until(lambda: not is_up(live.home))
        for path in live.home.path.iterdir():  # all but what the agents and their jobs have
            if path != live.home.nodes:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert verify(tmp_path / "b.tar", quiet).live_jobs == 1
        restored = restore(tmp_path / "b.tar", live.home, replace=True, progress=quiet)
        live.restart()

        assert live.client.job(done).state == "succeeded"
        assert live.client.job(old).state == "running"
        assert live.client.job(old).attempt == 1
        with pytest.raises(ShoalError, match=later):
            live.client.job(later)
        until(lambda: len(live.member_processes()) < len(before))
        assert set(live.member_processes()) < set(before), "the older job was left alone"
        new = live.run("echo two")
        assert new == f"j{restored.first_job}"
        assert live.wait(new) == "succeeded"
        events = [one.event for one in live.client.events().events]
        assert sum(isinstance(event, ClusterRestored) for event in events) == 1
        live.client.cancel(old)
        assert live.wait(old) == "cancelled"
