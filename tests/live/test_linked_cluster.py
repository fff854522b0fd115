"""A joined machine and a real controller: what a cut link and a killed controller leave alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import WAIT_S, until

from shoal.control.home import ClusterConfig
from shoal.engines.linked.joining import prepare
from shoal.model.node import JOINED, NodeSpec
from tests.engines.linked_rig import Proxy
from tests.live.cluster import Live, live_cluster, virtual_nodes

# It says its pid, waits for a file, and ends.
SCRIPT = 'echo $$; until [ -e "$GO" ]; do sleep 0.1; done; echo done'


class Far:
    """A machine whose way to the head leads through a proxy."""

    def __init__(self, live: Live, home: Path) -> None:
        self.live = live
        port = int(live.client.url.rpartition(":")[2])
        self.proxy = Proxy(port)
        spec = NodeSpec(id="far", cpu_milli=64_000, memory_mb=1_000, gpus=2, origin=JOINED)
        token = live.home.join_token.read_text().strip()
        folder = prepare(home, f"https://127.0.0.1:{self.proxy.port}", token, spec)
        # Without the head's own address, which this machine would try as well.
        path = folder / "link.json"
        file = msgspec.json.decode(path.read_bytes())
        file["urls"] = [f"https://127.0.0.1:{self.proxy.port}"]
        path.write_bytes(msgspec.json.encode(file))
        command = [sys.executable, "-m", "shoal.agent.starter", str(folder), "--foreground"]
        self.starter = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(lambda: self.health() == "ready")

    def health(self) -> str:
        found = [one for one in self.live.client.nodes() if one.id == "far"]
        return found[0].health if found else ""

    def end(self) -> None:
        self.starter.terminate()
        self.starter.wait(WAIT_S)
        self.proxy.close()


@pytest.fixture(scope="module")
def far() -> Iterator[Far]:
    config = ClusterConfig(nodes=virtual_nodes(1), host="0.0.0.0", port=0)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-far-") as scratch,
        live_cluster(config=config) as live,
    ):
        policy = live.client.policy()
        live.client.set_policy(
            msgspec.structs.replace(policy, silent_after_ms=2_000, grace_ms=6_000)
        )
        made = Far(live, Path(scratch) / "home")
        try:
            yield made
        finally:
            made.end()


def submit(far: Far, go: Path) -> str:
    """A job that fits no other node; returns when it runs there."""
    job = far.live.client.submit(
        far.live.spec("sh", "-c", SCRIPT, env={"GO": str(go)}, cpu_milli=60_000)
    ).id
    far.live.wait(job, "running")
    until(lambda: far.live.output(job) != "")
    return job


def finish(far: Far, job: str, go: Path) -> None:
    """It went on in its only attempt, and its whole output is there."""
    pid = far.live.output(job).split()[0]
    assert Path(f"/proc/{pid}").exists()
    go.touch()
    assert far.live.wait(job) == "succeeded"
    assert far.live.output(job) == f"{pid}\ndone\n"
    assert far.live.client.job(job).attempt == 1


def test_a_link_that_is_down_beyond_the_grace_time_costs_a_job_nothing_that_fits_nowhere_else(
    far: Far, tmp_path: Path
) -> None:
    job = submit(far, tmp_path / "go")
    far.proxy.blocked = True
    far.proxy.cut()
    until(lambda: far.health() == "silent")
    assert far.live.client.job(job).state == "running"
    until(lambda: far.health() == "lost")
    assert far.live.client.job(job).state == "waiting"
    far.proxy.blocked = False
    until(lambda: far.health() == "ready")
    until(lambda: far.live.client.job(job).state == "running")
    finish(far, job, tmp_path / "go")


def test_a_controller_that_is_killed_is_dialled_again_and_finds_the_job_running(
    far: Far, tmp_path: Path
) -> None:
    job, before = submit(far, tmp_path / "go"), far.live.controller_pid()
    os.kill(before, signal.SIGKILL)
    until(lambda: far.live.controller_pid() != before)
    until(lambda: far.health() == "ready")
    finish(far, job, tmp_path / "go")
