"""Hosts that share no disk hold each other's checkpoints: the head keeps manifests only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.hosts import Host, Net

from shoal.control.kept_files import Index
from shoal.model.node import NodeIntent
from tests.netns.cluster import POLICY, Cluster

MB = 1_000_000
SIZE = 24 * MB
SCRIPT = f"""
cd $SHOAL_CHECKPOINT_DIR
test -e model.pt || {{ head -c {SIZE} /dev/urandom > .new; mv .new model.pt; }}
echo attempt $SHOAL_ATTEMPT has $(sha256sum < model.pt)
while ! test -e $FINISH; do sleep 0.2; done
"""

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def cluster(net: Net) -> Iterator[Cluster]:
    made = Cluster(net, ("h1", "h2", "h3"))
    policy = msgspec.structs.replace(POLICY, checkpoint_peers=True)
    made.ask(lambda client: client.set_policy(policy))
    made.ask(lambda client: client.set_intent("n1", NodeIntent.CORDONED))
    made.ask(lambda client: client.set_secret("encryption-key", b"0123456789abcdef" * 4))
    yield made
    made.close()


def index(cluster: Cluster, job: str) -> Index:
    path = cluster.head.home / ".shoal" / "outputs" / job / "index.json"
    return msgspec.json.decode(path.read_bytes(), type=Index) if path.exists() else Index()


def holders(cluster: Cluster, job: str) -> tuple[str, ...]:
    return next((copy.holders for copy in index(cluster, job).held.values()), ())


def received(host: Host) -> int:
    text = host.run("cat", "/proc/net/dev").stdout
    return int(text.partition("eth0:")[2].split()[0])


def sums(cluster: Cluster, job: str, attempt: int) -> list[str]:
    text = cluster.output(job, 0, attempt).decode()
    return re.findall(rf"attempt {attempt} has (\w+)", text)


def test_bytes_into_the_head_for_each_byte_of_a_checkpoint(cluster: Cluster) -> None:
    figures = []
    for peers in (False, True):
        policy = msgspec.structs.replace(POLICY, checkpoint_peers=peers)
        cluster.ask(lambda client: client.set_policy(policy))  # noqa: B023
        finish = cluster.shared / f"finish-{peers}-figure"
        before = received(cluster.head)
        env = {"FINISH": str(finish), "PATH": "/usr/bin:/bin"}
        job = cluster.submit(SCRIPT, gpus=1, env=env)
        cluster.until(lambda: bool(index(cluster, job).attempt), "nothing was copied")  # noqa: B023
        figures.append((received(cluster.head) - before) / SIZE)
        finish.touch()
        assert cluster.wait(job).state == "succeeded"
    through_head, through_peers = figures
    print(f"\nbytes into the head per byte: {through_head:.3f}, with peers {through_peers:.4f}")
    assert through_head > 1 > 0.1 > through_peers


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_job_goes_on_from_its_peers_copy_and_the_copy_is_made_again(
    cluster: Cluster, encrypt: bool, tmp_path: Path
) -> None:
    finish = cluster.shared / f"finish-{encrypt}"
    job = cluster.submit(
        SCRIPT, gpus=1, encrypt=encrypt, env={"FINISH": str(finish), "PATH": "/usr/bin:/bin"}
    )
    cluster.until(lambda: len(holders(cluster, job)) == 2, "nobody holds a copy")
    kept = cluster.head.home / ".shoal" / "outputs" / job
    assert sum(path.stat().st_size for path in kept.rglob("*") if path.is_file()) < MB
    first, second = holders(cluster, job)
    assert first == cluster.job(job).gang[0].node and first != second
    listed = cluster.shoal(cluster.head, "ls", job, "--checkpoints")
    assert "24.0 MB" in listed
    cluster.shoal(cluster.head, "cp", "--checkpoints", f"{job}:model.pt", str(tmp_path))
    cluster.hosts[first].power_off()
    cluster.until(lambda: cluster.job(job).attempt == 2, "it was not healed")
    cluster.until(lambda: bool(sums(cluster, job, 2)), "it does not go on")
    assert sums(cluster, job, 2) == sums(cluster, job, 1)
    assert re.search(r"gets? its checkpoint from ", cluster.story()), cluster.story()
    alive = {"h1", "h2", "h3"} - {first}
    cluster.until(lambda: set(holders(cluster, job)) == alive, "it is not held twice again")
    finish.touch()
    assert cluster.wait(job).state == "succeeded", cluster.story()
    cluster.hosts[first].power_on()
    cluster.join(cluster.hosts[first])
    cluster.until(lambda: first in cluster.ready(), "it does not come back")
