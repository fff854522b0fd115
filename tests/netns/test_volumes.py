"""A volume from a web server on hosts with slow links, one of which loses power in the middle."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator

import pytest
from harness.hosts import SERVE, Net

from tests.needs import need
from tests.netns.cluster import Cluster

need("fsspec")
need("aiohttp")

pytestmark = pytest.mark.soak

MB, PORT = 1_000_000, 8000
DATA = random.Random(11).randbytes(40 * MB)
SUM = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(scope="module")
def cluster(net: Net) -> Iterator[Cluster]:
    made = Cluster(net, ("h1", "h2", "h3"))
    folder = made.head.home / "origin"
    folder.mkdir()
    (folder / "set.bin").write_bytes(DATA)
    made.head.start(sys.executable, "-c", SERVE, str(folder), str(PORT))
    port = ("bash", "-c", f"exec 3<>/dev/tcp/{made.head.address}/{PORT}")
    made.until(lambda: made.head.run(*port).returncode == 0, "the origin does not listen")
    for name in ("h1", "h2", "h3"):
        made.hosts[name].slow("60mbit")
    yield made
    made.close()


def start(cluster: Cluster, node: str) -> str:
    url = f"http://{cluster.head.address}:{PORT}/set.bin"
    script = "sha256sum < $SHOAL_VOLUME_DATA/set.bin"
    return cluster.submit(script, gpus=1, volumes=[f"{url}:data"], where=[f"node={node}"])


def test_the_others_get_all_of_it_when_one_host_loses_power_and_the_next_job_fetches_nothing(
    cluster: Cluster,
) -> None:
    before = cluster.head.sent_bytes()
    jobs = {node: start(cluster, node) for node in ("h1", "h2", "h3")}
    cluster.until(lambda: "is fetching volume data" in cluster.job(jobs["h1"]).why, "no fetch")
    cluster.until(lambda: cluster.head.sent_bytes() - before > len(DATA) / 4, "no bytes")
    cluster.hosts["h1"].power_off()
    for node in ("h2", "h3"):
        assert cluster.wait(jobs[node]).state == "succeeded", cluster.story()
        assert cluster.output(jobs[node], 0).decode().split()[0] == SUM
    left = cluster.head.sent_bytes() - before
    print(f"\n{left / len(DATA):.2f} x the set left the origin")
    assert left < 2 * len(DATA), "two hosts without each other would take as much"
    before = cluster.head.sent_bytes()
    again = start(cluster, "h2")
    assert cluster.wait(again).state == "succeeded"
    assert cluster.output(again, 0).decode().split()[0] == SUM
    assert cluster.head.sent_bytes() - before < 2 * MB, "it is there already"
