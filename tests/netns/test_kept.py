"""Hosts that share no disk: what a job saved and what it made are there after its host is gone."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.hosts import Net

from shoal.model.node import NodeIntent
from tests.netns.cluster import Cluster

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def cluster(net: Net) -> Iterator[Cluster]:
    made = Cluster(net, ("h1", "h2", "h3"))
    yield made
    made.close()


def text(cluster: Cluster, job: str, attempt: int) -> str:
    return cluster.output(job, 0, attempt).decode()


# What torch does with the files of a gang changes nothing for the head that keeps them.
@pytest.mark.parametrize("program", ["saves.py", pytest.param("ddp.py", marks=pytest.mark.soak)])
def test_a_gang_over_two_hosts_goes_on_at_the_saved_step_when_one_is_powered_off(
    cluster: Cluster, program: str
) -> None:
    """The first member saves, on the host that is lost."""
    cluster.ask(lambda client: client.set_intent("n1", NodeIntent.CORDONED))
    finish = cluster.shared / f"finish-{program}"
    # A host's own name leads it to its loopback here.
    env = {"PATH": os.environ["PATH"], "FINISH": str(finish), "GLOO_SOCKET_IFNAME": "eth0"}
    script = "echo from $SHOAL_NODE > $SHOAL_OUTPUT/early.$SHOAL_NODE; "
    script += f"exec {sys.executable} {HERE / program}"
    job = cluster.submit(script, members=2, gpus=1, env=env)
    kept = cluster.head.home / ".shoal" / "outputs" / job
    cluster.until(lambda: (kept / "index.json").exists(), "nothing was copied")
    early = f"early.{cluster.job(job).gang[0].node}"
    cluster.until(lambda: (kept / "output" / early).exists(), "the result was not copied")
    lost = cluster.hosts[cluster.job(job).gang[0].node]
    lost.power_off()
    cluster.until(lambda: cluster.job(job).attempt == 2, "it was not healed")
    cluster.until(lambda: "begins with step" in text(cluster, job, 2), "it does not go on")
    saved = [int(step) for step in re.findall(r"saved step (\d+)", text(cluster, job, 1))]
    begun = re.search(r"begins with step (\d+): (.*)", text(cluster, job, 2))
    assert begun is not None
    step, said = int(begun[1]), re.findall(r"\((\d+), ([-0-9.e]+)\)", begun[2])
    assert 0 < step <= max(saved) + 1, "it goes on at a step that it saved (a line may be lost)"
    assert len(said) == 2 and len(set(said)) == 1, "both members begin with the same weights"
    placed = cluster.story()
    assert re.search(r"gets? its checkpoint from", placed), placed
    finish.touch()
    assert cluster.wait(job).state == "succeeded", cluster.story()
    # A result of the host that is off, fetched by the command.
    fetched = cluster.head.home / "fetched"
    cluster.shoal(cluster.head, "cp", f"{job}:{early}", str(fetched))
    assert fetched.read_text() == f"from {lost.name}\n"
    assert f"{lost.name}" in early
    assert "model.txt" in cluster.shoal(cluster.head, "ls", job)
