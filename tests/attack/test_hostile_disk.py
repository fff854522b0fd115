"""A tenant's job that fills the disk that the head and its nodes share, with real processes.

The disk is not divided: whoever may write there can fill it. What stops the harm is that the job
gets ENOSPC, that what it wrote outside of its checkpoints is removed when it ends, and that the
head and the node need no help to go on.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.client import ShoalError
from tests.live.cluster import Live, live_cluster
from tests.needs import need_cgroups, need_root

DISK_MB = 320  # the check of a node wants 256 MB free
HALF = DISK_MB << 19
GOOD, EVIL = 61_921, 61_922  # Unix users of the two tenants
# Writes in the named places until none takes a byte, and what becomes free after that. Its exit
# code is the error that it got: on a full disk, nothing that it prints would arrive.
FILLS = """
import os, sys, time
places = {"scratch": os.environ["SHOAL_SCRATCH"], "tmp": "/tmp", "home": os.environ["HOME"],
          "checkpoints": os.environ["SHOAL_CHECKPOINT_DIR"]}
until, names = sys.argv[1], sys.argv[2:]
print("fills", flush=True)
files = [open(f"{places[name]}/filler", "wb", buffering=0) for name in names]
def fill(file, size):
    while True:
        try:
            file.write(b"x" * size)
        except OSError as error:
            return error.errno
while True:
    errors = {fill(file, size) for size in (1 << 20, 4096, 1) for file in files}
    if until == "full":
        sys.exit(errors.pop() if len(errors) == 1 else 99)
    time.sleep(0.005)
"""


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    need_root()
    need_cgroups()
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=755", "shoal-test", str(disk)]
    subprocess.run(mount, check=True)
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    try:
        with live_cluster(nodes=1, gpus=0) as cluster:
            policy = msgspec.structs.replace(cluster.client.policy(), retest_ms=500)
            cluster.client.set_policy(policy)
            cluster.client.add_tenant("good", uid=GOOD)
            cluster.client.add_tenant("evil", uid=EVIL)
            yield cluster
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fills(live: Live, until: str, *places: str) -> str:
    script = (sys.executable, "-c", FILLS, until, *places)
    return live.client.submit(live.spec(*script, tenant="evil")).id


def free_bytes(live: Live) -> int:
    stats = os.statvfs(live.home.path)
    return stats.f_bavail * stats.f_frsize


def submit(live: Live, **fields: object) -> str:
    """The id of a job of the other tenant, or nothing if it was refused."""
    try:
        return live.client.submit(live.spec("echo", "fine", tenant="good", **fields)).id  # type: ignore[arg-type]
    except ShoalError as error:
        if "is full" not in str(error):
            raise
        return ""


def taken(live: Live, accepted: list[str]) -> bool:
    accepted.append(submit(live))
    return bool(accepted[-1])


def standing(live: Live) -> str:
    (node,) = live.client.nodes()
    return node.standing


def test_a_job_that_fills_the_disk_fails_alone_and_all_that_was_accepted_runs(live: Live) -> None:
    # In its scratch and its /tmp: it gets ENOSPC, fails once, and takes no node with it.
    job = fills(live, "full", "scratch", "tmp")
    assert live.wait(job) == "failed"
    view = live.client.job(job)
    assert (view.code, view.attempt) == (errno.ENOSPC, 1), view.why
    assert "it filled this node's disk" in view.why
    assert standing(live) == "ok", "its files are gone, so the node is in order"
    until(lambda: free_bytes(live) > HALF, "they are removed when it ends")

    # It takes each byte that becomes free, the head's spare room included. It can be cancelled.
    accepted: list[str] = []
    until(lambda: taken(live, accepted))
    job = fills(live, "cancelled", "scratch", "tmp")
    until(lambda: free_bytes(live) < 4096)
    while accepted[-1]:
        accepted.append(submit(live, env={"FILL": "x" * 5000}))
        assert len(accepted) < 2_000, "nothing was refused"
    until(lambda: free_bytes(live) < 4096)
    live.client.cancel(job)
    assert live.wait(job) == "cancelled"
    until(lambda: taken(live, accepted), "by itself")
    for good in filter(None, accepted):
        assert live.wait(good) == "succeeded", live.client.job(good).why
        assert live.output(good) == "fine\n"
    assert live.client.status().restarts == 0

    # Its home and its checkpoints stay: no other job is started there until there is room.
    job = fills(live, "full", "home", "checkpoints")
    until(lambda: standing(live) == "quarantined")
    live.client.cancel(job)
    assert live.client.status().alarms, "the operator sees it"
    for filler in live.home.path.glob("**/filler"):
        assert filler.stat().st_uid == EVIL, "its owner names the tenant"
        filler.unlink()
    until(lambda: taken(live, accepted), "by itself")
    assert live.wait(accepted[-1]) == "succeeded"
    assert standing(live) == "ok"
