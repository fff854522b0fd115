"""A mount that hangs blocks neither the agents nor the controller: its jobs get a reason, others do
not notice, and everything goes on when it answers again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.mounts import Fuse, fuse
from harness.waiting import until

from tests.live.cluster import Live, live_cluster


@pytest.fixture(scope="module")
def mount() -> Iterator[Fuse]:
    with fuse() as made:
        yield made


@pytest.fixture(scope="module")
def live(mount: Fuse) -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=2) as cluster:
        yield cluster


def test_jobs_wait_for_a_mount_that_hangs_with_its_name_and_go_on_when_it_answers(
    live: Live, mount: Fuse
) -> None:
    data = {"volumes": [f"{mount.path}:data"]}
    script = "until test -e $SHOAL_VOLUME_DATA/go; do sleep 0.2; done; echo seen"
    inside = live.run(script, workdir=str(mount.path), **data)
    live.wait(inside, "running")
    mount.stop()
    try:
        waits = live.run("echo late", **data)
        says = f"{mount.path} "
        until(lambda: says in live.client.job(waits).why, "why names it")
        until(lambda: says in live.client.job(inside).why, "and does for the job that runs there")
        until(lambda: any(says in node.hangs for node in live.client.nodes()), "so do the nodes")
        assert any(says in text for text in live.client.status().alarms)
        assert live.wait(live.run("echo other", gpus=1)) == "succeeded"
        assert all(node.health == "ready" for node in live.client.nodes())
        killed = live.run("sleep 600", **data)
        live.client.cancel(killed)
        assert live.wait(killed) == "cancelled"
        # A process that waits for the mount ends with it, and the agent does not wait for that.
        stuck = live.client.job(inside).id
        live.client.cancel(stuck)
        assert live.wait(live.run("echo another", gpus=1)) == "succeeded"
    finally:
        mount.go_on()
    assert live.wait(stuck) == "cancelled"
    assert live.wait(waits) == "succeeded"
    until(lambda: not any(node.hangs for node in live.client.nodes()), "nothing hangs any more")


def test_a_job_that_starts_while_the_mount_is_stopped_and_started_again_and_again_ends_well(
    live: Live, mount: Fuse
) -> None:
    """In whatever moment of a launch it happens."""
    data = {"volumes": [f"{mount.path}:data"], "workdir": str(mount.path)}
    for round_ in range(3):
        jobs = [live.run("echo $PWD", cpu_milli=10, **data) for _ in range(4)]
        mount.stop()
        other = live.run("echo other", cpu_milli=10)
        assert live.wait(other) == "succeeded", round_
        mount.go_on()
        assert {live.wait(job) for job in jobs} == {"succeeded"}
