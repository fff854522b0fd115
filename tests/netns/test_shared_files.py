"""A real parallel file system (MooseFS; GlusterFS in `make long`) that nodes of a cluster mount by
FUSE: what jobs read, write and save there, while its servers are killed and held."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from harness.hosts import switched
from harness.shared_files import Gluster, Moose, SharedFiles, missing
from harness.waiting import until

from shoal.model.node import NodeIntent
from tests.needs import need
from tests.netns.cluster import Cluster

ROOT = Path(__file__).parents[2]

KINDS = [Moose, pytest.param(Gluster, marks=pytest.mark.soak)]
# Writes one file after the other, each whole, and reads each again.
WRITES = """
cd $SHOAL_VOLUME_SEA && mkdir -p $SHOAL_JOB_ID && cd $SHOAL_JOB_ID || exit 3
n=0
until test -e $SHARED/$FINISH; do
    n=$((n + 1)); name=$SHOAL_MEMBER.$n
    seq $n 20000 > .$name && sync .$name && mv .$name $name || exit 4
    test "$(seq $n 20000 | cksum)" = "$(cksum < $name)" || exit 5
    echo $n > $SHARED/$SHOAL_JOB_ID.$SHOAL_MEMBER
done
"""


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def sea(request: pytest.FixtureRequest, hosts_possible: None) -> Iterator[SharedFiles]:
    if reason := missing(request.param.programs):
        pytest.skip(reason)
    with switched() as net:
        yield request.param(net)


@pytest.fixture(scope="module")
def cluster(sea: SharedFiles) -> Iterator[Cluster]:
    env = {"SHOAL_CHECKPOINT_ROOT": f"{sea.path}/checkpoints"}
    made = Cluster(sea.net, ("h1", "h2"), env=env, prepare=sea.mount)
    yield made
    made.close()


def at(cluster: Cluster, sea: SharedFiles, script: str, **fields: Any) -> str:
    return cluster.submit(script, volumes=[f"{sea.path}:sea"], **fields)


def cordon(cluster: Cluster, *names: str) -> None:
    """These, and no others."""
    for name in cluster.hosts:
        intent = NodeIntent.CORDONED if name in names else NodeIntent.OPEN
        cluster.ask(lambda client, n=name, i=intent: client.set_intent(n, i))  # type: ignore[misc]


def done(cluster: Cluster, job: str) -> dict[int, int]:
    """How many files each member has written."""
    files = cluster.shared.glob(f"{job}.*")
    return {int(path.suffix[1:]): int(until(path.read_text, "it is written")) for path in files}


def goes_on(cluster: Cluster, job: str, members: int) -> None:
    before = done(cluster, job)
    cluster.until(
        lambda: all(done(cluster, job).get(n, 0) > before.get(n, 0) + 1 for n in range(members)),
        f"{job} does not go on",
    )


def whole(cluster: Cluster, sea: SharedFiles, job: str) -> None:
    """Everything that its members wrote is there, with the right content, as the head sees it."""
    for member, count in done(cluster, job).items():
        same = f'test "$(seq $n 20000 | cksum)" = "$(cksum < {sea.path}/{job}/{member}.$n)"'
        script = f"for n in $(seq {count}); do {same} || exit 1; done"
        found = cluster.head.run("sh", "-c", script)
        assert found.returncode == 0, found.stderr


def test_jobs_write_and_read_on_while_a_server_is_killed(
    cluster: Cluster, sea: SharedFiles
) -> None:
    cordon(cluster, "n1")
    job = at(cluster, sea, WRITES.replace("$FINISH", "killed"), members=2, gpus=1)
    cluster.wait(job, "running")
    cordon(cluster, "h1", "h2")
    elsewhere = cluster.submit("until test -e $SHARED/killed; do sleep 0.1; done", gpus=1)
    goes_on(cluster, job, members=2)
    store = sea.stores[0]
    store.kill()
    goes_on(cluster, job, members=2)
    store.start()
    goes_on(cluster, job, members=2)
    (cluster.shared / "killed").touch()
    for one in (job, elsewhere):
        ended = cluster.wait(one)
        assert (ended.state, ended.attempt) == ("succeeded", 1), cluster.story()
    whole(cluster, sea, job)


def test_a_host_whose_client_is_held_gets_no_job_that_needs_it(
    cluster: Cluster, sea: SharedFiles
) -> None:
    cordon(cluster)
    with sea.held(sea.clients["h1"]):
        bound = at(cluster, sea, "cat $SHOAL_VOLUME_SEA/.h1", where=["node=h1"])
        says = f"{sea.path} "
        cluster.until(lambda: says in cluster.job(bound).why, "why does not name it")
        cluster.until(lambda: [n.id for n in cluster.nodes() if n.hangs] == ["h1"], "nor its node")
        free = [at(cluster, sea, "echo on $SHOAL_NODE", gpus=1) for _ in range(4)]
        for job in free:
            assert cluster.wait(job).state == "succeeded", cluster.story()
            assert b"h1" not in cluster.output(job, 0)
        assert cluster.ready() == {"n1", "h1", "h2"}
    assert cluster.wait(bound).state == "succeeded", cluster.story()
    assert cluster.output(bound, 0) == b"h1\n"


def test_while_nothing_answers_jobs_wait_with_its_name_and_others_do_not_notice(
    cluster: Cluster, sea: SharedFiles
) -> None:
    cordon(cluster, "n1")
    job = at(cluster, sea, WRITES.replace("$FINISH", "answered"), members=2, gpus=1)
    goes_on(cluster, job, members=2)
    cordon(cluster)
    with sea.held(*sea.answers):
        waits = at(cluster, sea, "echo late")
        says = f"{sea.path} "
        cluster.until(lambda: says in cluster.job(waits).why, "why does not name it")
        cluster.until(lambda: says in cluster.job(job).why, "nor for the job that runs there")
        for _ in range(5):
            other = cluster.wait(cluster.submit("echo other", gpus=1))
            assert (other.state, other.gang[0].node) == ("succeeded", "n1"), cluster.story()
        assert cluster.ready() == {"n1", "h1", "h2"}
        alarms = cluster.ask(lambda client: client.status()).alarms
        assert any(says in text for text in alarms), alarms
    goes_on(cluster, job, members=2)
    (cluster.shared / "answered").touch()
    assert cluster.wait(waits).state == "succeeded", cluster.story()
    ended = cluster.wait(job)
    assert (ended.state, ended.attempt) == ("succeeded", 1), cluster.story()
    whole(cluster, sea, job)


def test_a_host_whose_client_died_gets_no_job_that_needs_it_until_it_is_mounted_again(
    cluster: Cluster, sea: SharedFiles
) -> None:
    """Its mount answers, with an error. A job that may only run there waits, and does not fail."""
    cordon(cluster)
    sea.clients["h1"].kill()
    # Between two mounts there is a folder of the host's own, and the job may start in that moment.
    look = "until cat $SHOAL_VOLUME_SEA/.h1; do sleep 0.1; done"
    bound = at(cluster, sea, look, where=["node=h1"])
    free = at(cluster, sea, "echo on $SHOAL_NODE", gpus=1, members=2)
    cluster.until(lambda: f"{sea.path} " in cluster.job(bound).why, "why does not name it")
    ended = cluster.wait(free)
    assert (ended.state, {one.node for one in ended.gang}) == ("succeeded", {"n1", "h2"})
    sea.unmount(cluster.hosts["h1"])
    sea.mount(cluster.hosts["h1"])
    ended = cluster.wait(bound)
    assert (ended.state, ended.failures) == ("succeeded", 0), cluster.story()


@pytest.mark.soak
def test_a_training_on_two_hosts_goes_on_at_the_saved_step_when_one_is_powered_off(
    cluster: Cluster, sea: SharedFiles
) -> None:
    """Its checkpoints are on the file system: nothing is copied, and no sample is used twice."""
    need("torch")
    add(cluster, sea, "h3")
    cordon(cluster, "n1")
    env = {"PATH": os.environ["PATH"], "GLOO_SOCKET_IFNAME": "eth0", "SLEEP": "0.2", "EVERY": "2"}
    epochs = 8
    script = f"exec {sys.executable} {ROOT / 'tests/train/scripts/tiny.py'} 40 4 {epochs}"
    where = ["node!=n1"]
    job = cluster.submit(script, members=2, gpus=1, env=env, where=where, restart="on-node-loss")
    saved = r"saved its work up to step (\d+)"
    cluster.until(lambda: bool(re.findall(saved, cluster.story())), "it does not save")
    step = max(map(int, re.findall(saved, cluster.story())))
    lost = cluster.hosts[cluster.job(job).gang[0].node]
    lost.power_off()
    ended = cluster.wait(job)
    assert (ended.state, ended.attempt) == ("succeeded", 2), cluster.story()
    first, second = (cluster.output(job, 0, attempt).decode() for attempt in (1, 2))
    steps = [int(step) for step in re.findall(r"step (\d+)", first)]
    (restored,) = re.findall(r"restored (\d+) after", second)
    assert step <= int(restored) <= max(steps)
    assert f"used {[epochs] * 40}" in second
    assert "gets its checkpoint from" not in cluster.story(), "all of these see it"
    lost.power_on()
    sea.mount(lost)
    cluster.join(lost)
    cluster.until(lambda: lost.name in cluster.ready(), "it does not come back")


@pytest.mark.soak
def test_a_job_waits_for_stores_that_are_held_and_its_host_does_not(
    cluster: Cluster, sea: SharedFiles
) -> None:
    """MooseFS still answers for names, and for no bytes."""
    cordon(cluster, "n1")
    job = at(cluster, sea, WRITES.replace("$FINISH", "held"), members=2, gpus=1)
    goes_on(cluster, job, members=2)
    cordon(cluster)
    with sea.held(*sea.stores):
        seen = done(cluster, job)
        since = time.monotonic()
        while time.monotonic() - since < 20:  # some are named, and some only do not go on
            other = cluster.wait(cluster.submit("echo other", gpus=1, where=["node=n1"]))
            assert other.state == "succeeded", cluster.story()
        assert cluster.ready() >= {"n1", "h1", "h2"}
        assert all(count <= seen[member] + 2 for member, count in done(cluster, job).items())
        print(f"{type(sea).__name__}, stores held: {cluster.job(job).why}")
    goes_on(cluster, job, members=2)
    (cluster.shared / "held").touch()
    ended = cluster.wait(job)
    assert (ended.state, ended.attempt) == ("succeeded", 1), cluster.story()
    whole(cluster, sea, job)


@pytest.mark.soak
def test_what_a_job_keeps_and_what_a_check_measures_there(
    cluster: Cluster, sea: SharedFiles, tmp_path: Path
) -> None:
    cordon(cluster)
    add(cluster, sea, "h3")
    script = (
        "cp $SHOAL_VOLUME_SEA/.h1 $SHOAL_OUTPUT/kept && cp $SHOAL_OUTPUT/kept $SHOAL_CHECKPOINT_DIR"
    )
    job = at(cluster, sea, f"{script} && ls $SHOAL_CHECKPOINT_DIR", where=["node=h2"])
    assert cluster.wait(job).state == "succeeded", cluster.story()
    cluster.shoal(cluster.head, "cp", f"{job}:kept", str(tmp_path))
    assert (tmp_path / "kept").read_text() == "h1\n"
    seen = cluster.head.run("cat", f"{sea.path}/checkpoints/{job}/kept")
    assert seen.stdout == "h1\n", seen.stderr
    text = cluster.shoal(cluster.head, "check", "--storage", str(sea.path), "h1", "h2")
    print(text)
    assert "h1" in text and "h2" in text
    assert "MB/s" in text or "GB/s" in text


@pytest.mark.soak
def test_a_client_that_is_held_for_a_minute(cluster: Cluster, sea: SharedFiles) -> None:
    """Figures for docs/measurements.md."""
    cordon(cluster, "n1", "h2")
    job = at(cluster, sea, WRITES.replace("$FINISH", "minute"), gpus=1)
    goes_on(cluster, job, members=1)
    cordon(cluster)
    took: list[float] = []
    with sea.held(sea.clients["h1"]):
        since = time.monotonic()
        needs = at(cluster, sea, "echo late", where=["node=h1"])
        cluster.until(lambda: f"{sea.path} " in cluster.job(job).why, "why does not name it")
        named_s = time.monotonic() - since
        while time.monotonic() - since < 60:
            began = time.monotonic()
            other = cluster.submit("true", where=["node!=h1"])
            until(lambda: cluster.job(other).finished_ms, "it ends", look_s=0.002)  # noqa: B023
            took.append(time.monotonic() - began)
            assert cluster.job(other).state == "succeeded"
        assert cluster.ready() >= {"n1", "h1", "h2"}
        assert f"{sea.path} " in cluster.job(needs).why
    goes_on_at = time.monotonic()
    (cluster.shared / "minute").touch()
    for one in (job, needs):
        ended = cluster.wait(one)
        assert (ended.state, ended.failures) == ("succeeded", 0), cluster.story()
    after_s = time.monotonic() - goes_on_at
    whole(cluster, sea, job)
    print(
        f"\n{type(sea).__name__}: named after {named_s:.1f} s; {len(took)} other jobs, median "
        f"{median(took):.3f} s, longest {max(took):.3f} s; both ended {after_s:.1f} s after it"
    )


def add(cluster: Cluster, sea: SharedFiles, name: str) -> None:
    """One more host with the file system, unless it is there."""
    if name not in cluster.hosts:
        host = cluster.net.add(name)
        sea.mount(host)
        cluster.join(host)
        cluster.until(lambda: name in cluster.ready(), f"{name} is not ready")
