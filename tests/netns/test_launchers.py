"""Launchers that start their own ranks do so inside the members of a gang, on hosts that have no
ssh between them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hosts import Net

from tests.needs import need, need_program
from tests.netns.cluster import Cluster

HERE = Path(__file__).parent
# Two ranks on each host, as the GPU is not what they are for.
MPIRUN = f"exec mpirun -N 2 --oversubscribe {sys.executable} {HERE / 'ranks.py'}"


@pytest.fixture(scope="module")
def cluster(net: Net) -> Iterator[Cluster]:
    need_program("mpirun")
    need("mpi4py")
    made = Cluster(net, ("h1",))
    yield made
    made.close()


def start(cluster: Cluster, script: str) -> str:
    return cluster.submit(script, members=2, members_per_node=1, gpus=1, launcher=True)


def ranks(cluster: Cluster, job: str) -> list[list[str]]:
    return sorted(cluster.lines(f"{job}.ranks"))


def started(cluster: Cluster) -> tuple[str, list[list[str]]]:
    job = start(cluster, f"{MPIRUN} wait")
    cluster.until(lambda: len(ranks(cluster, job)) == 4, "not all ranks have started")
    return job, ranks(cluster, job)


def left(cluster: Cluster) -> list[str]:
    """Processes of launchers and ranks, on all hosts: they are processes of this machine, too."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            marked = f"SHARED={cluster.shared}\0".encode()
            if marked in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(line)
        except OSError:
            continue
    return found


def test_mpirun_starts_its_ranks_in_the_members_of_both_hosts(cluster: Cluster) -> None:
    job = start(cluster, f"cat $SHOAL_HOSTFILE; echo $SHOAL_HOSTS; {MPIRUN}")
    assert cluster.wait(job).state == "succeeded", cluster.output(job, 0)
    head, other = (cluster.hosts[name].address for name in ("n1", "h1"))
    lines = cluster.output(job, 0).decode().splitlines()
    assert lines[:2] == [f"{head} slots=1", f"{other} slots=1"]
    assert lines[2] == f"{head}:1,{other}:1"
    found = [line[:-1] for line in ranks(cluster, job)]
    # Rank, size, sum of all ranks, node, member; and no RANK that would be the member's.
    where = ("n1 0", "n1 0", "h1 1", "h1 1")
    assert found == [f"{rank} 4 6 {place} -".split() for rank, place in enumerate(where)]


def test_a_rank_that_is_killed_ends_the_job_with_its_code(cluster: Cluster) -> None:
    job, found = started(cluster)
    assert found[3][3] == "h1"
    cluster.hosts["h1"].run("kill", "-KILL", found[3][-1])
    view = cluster.wait(job)
    assert (view.state, view.code) == ("failed", 137), view.why
    cluster.until(lambda: not left(cluster), "something of it is left")


def test_a_cancelled_job_leaves_no_rank_on_any_host(cluster: Cluster) -> None:
    job, _ = started(cluster)
    assert left(cluster)
    cluster.ask(lambda client: client.cancel(job))
    assert cluster.wait(job).state == "cancelled"
    cluster.until(lambda: not left(cluster), "something of it is left")


def test_a_stranger_cannot_start_anything_in_a_member(cluster: Cluster) -> None:
    """It finds the port, and does not know the key."""
    plan = "import json,os;p=json.load(open(os.environ['SHOAL_LAUNCH_PLAN']));"
    plan += "p['key']='0'*64;json.dump(p,open('plan','w'))"
    host = cluster.hosts["h1"].address
    script = f'{sys.executable} -c "{plan}"; SHOAL_LAUNCH_PLAN=$PWD/plan ssh {host} true'
    job = start(cluster, script)
    view = cluster.wait(job)
    assert (view.state, view.code) == ("failed", 255)
    assert "does not know the key" in cluster.output(job, 0).decode()
