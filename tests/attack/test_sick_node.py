"""A node with a small disk of its own that fills up, runs out of inodes, or becomes read-only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from harness.mounts import read_only
from harness.waiting import until

from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import bring_up, take_down
from shoal.core.state.events.nodes import NodeJudged
from shoal.model.health import Standing
from tests.live.cluster import Live, virtual_nodes

SICK, WELL = "n1", "n2"
# Enough for the check of a node to find it in order: it wants 256 MB free.
SIZE, INODES = "320m", 400
JOBS = 6
PATIENCE_S = 120


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")


def _mounts(disk: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if line.split()[1] == str(disk)]


@contextmanager
def cluster_with_a_small_disk() -> Iterator[tuple[Live, Path]]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    home = Home(Path(tempfile.mkdtemp(prefix="shoal-test-")))
    disk = home.node(SICK)
    disk.mkdir(parents=True, mode=0o700)
    _mount("-t", "tmpfs", "-o", f"size={SIZE},nr_inodes={INODES},mode=0700", "tmpfs", str(disk))
    try:
        bring_up(home, ClusterConfig(nodes=virtual_nodes(2, gpus=2), port=0), lambda _: None)
        live = Live(home)
        policy = msgspec.structs.replace(live.client.policy(), retest_ms=1_000)
        live.client.set_policy(policy)
        try:
            yield live, disk
        finally:
            live.client.close()
    finally:
        while len(_mounts(disk)) > 1:
            subprocess.run(["umount", "-l", str(disk)], check=True)
        take_down(home, lambda _: None)
        subprocess.run(["umount", "-l", str(disk)], capture_output=True, check=False)
        shutil.rmtree(home.path, ignore_errors=True)


def standing(live: Live) -> str:
    return {node.id: node for node in live.client.nodes()}[SICK].standing


def jobs_go_elsewhere(live: Live) -> None:
    """None fails, whatever its rule, and the node that cannot run them is closed. Each takes the
    whole other node for a while, so that the next one meets this one."""
    script, before = "sleep 0.5; echo fine", live.client.status().last_seq
    rules = ("never", "on-node-loss", "on-failure")
    jobs = [live.run(script, gpus=2, restart=rules[number % 3]) for number in range(JOBS)]
    for job in jobs:
        assert live.wait(job, timeout_s=PATIENCE_S) == "succeeded", live.client.job(job).why
        assert live.output(job) == "fine\n"
    assert {live.client.job(job).failures for job in jobs} == {0}
    # A retest may have passed by now: one file more than before may well have room.
    events = [one.event for one in live.client.events(after=before, node=SICK).events]
    judged = [event.record.standing for event in events if isinstance(event, NodeJudged)]
    assert Standing.QUARANTINED in judged


def is_well_again(live: Live) -> None:
    until(lambda: standing(live) == "ok")


def test_jobs_pass_a_node_by_whose_disk_takes_nothing_and_it_returns_when_mended() -> None:
    with cluster_with_a_small_disk() as (live, disk):
        jobs_run_on_both = [live.run("echo fine", gpus=2) for _ in range(4)]
        for job in jobs_run_on_both:
            assert live.wait(job) == "succeeded"
        # Until then, what is left of them may go and free what it took.
        until(lambda: not list((disk / "members").glob("j*")))

        names = [disk / f"inode-{number}" for number in range(INODES)]
        with contextlib.suppress(OSError):
            for name in names:
                name.touch()
        jobs_go_elsewhere(live)
        for name in names:
            name.unlink(missing_ok=True)
        is_well_again(live)

        filler = disk / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        jobs_go_elsewhere(live)
        filler.unlink()
        is_well_again(live)

        with read_only(disk):
            with pytest.raises(OSError, match="Read-only"):
                (disk / "anything").touch()
            jobs_go_elsewhere(live)
            until(lambda: not live.member_processes())
        is_well_again(live)
        last = [live.run("sleep 2; echo fine", gpus=2) for _ in range(2)]
        for job in last:
            assert live.wait(job) == "succeeded"
        assert {n for job in last for n in live.client.job(job).nodes} == {SICK, WELL}
