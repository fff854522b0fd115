"""A whole cluster on a real Slurm, run by an ordinary user: nodes come with the queue, end in every
way that Slurm knows, and go."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.slurm import Slurm

from tests.engines.slurm.site import Site, site

FOR_EVER = "echo $SHOAL_NODE $CUDA_VISIBLE_DEVICES; exec sleep 600"


@pytest.fixture(scope="module")
def there(real: Slurm) -> Iterator[Site]:
    with site(real) as made:
        yield made


@pytest.fixture(autouse=True)
def tidy(there: Site) -> Iterator[None]:
    yield
    live = [job["id"] for job in there.json("ps")]
    if live:
        there.shoal("cancel", *live)
    there.supply(most=0)
    there.until("all nodes to be given back", lambda: not there.slurm_jobs())
    there.until("no order to be left", lambda: not there.json("supply")["orders"])


def holders(there: Site, job: str) -> list[str]:
    """The Slurm jobs under the nodes of a job."""
    nodes = there.job(job)["nodes"]
    orders = there.json("supply")["orders"]
    return [order["handle"] for node in nodes for order in orders if node in order["nodes"]]


def test_the_pool_grows_with_the_queue_and_goes_back_to_nothing(there: Site) -> None:
    foreign = there.real.sbatch("--job-name=theirs", script="sleep 600")
    there.supply()
    gang = there.run('printf "%s|" $SHOAL_NODE $CUDA_VISIBLE_DEVICES; id -u', "-n", "2")
    single = there.run("true")
    assert there.until_job(gang, "succeeded", "failed")["state"] == "succeeded"
    assert there.until_job(single, "succeeded", "failed")["state"] == "succeeded"
    said = there.shoal("logs", gang)
    # Two allocations of one machine: each member has the GPUs of its own.
    devices = {line.split("|")[1] for line in said.splitlines() if "|" in line}
    assert len(devices) == 2 and f"{there.uid}\n" in said, said
    there.until("the pool to be empty", lambda: not there.slurm_jobs())
    assert there.real.run("squeue", "--noheader", "--format=%A %T").split() == [foreign, "RUNNING"]
    there.real.run("scancel", foreign)
    told = there.home / "h" / "slurm"
    there.until("the tokens to be removed", lambda: not list(told.glob("*.json")))


def test_nodes_have_what_slurm_gave_and_its_words_as_labels(there: Site) -> None:
    there.supply(nodelist="n3", labels={"pool": "a"}, lasts="30m")
    job = there.run("sleep 600", "--time-limit", "10m", "--where", "pool=a")
    there.until_job(job, "running")
    (node,) = there.json("nodes")
    assert (node["gpus"], node["cpu_milli"], node["memory_mb"]) == (2, 2000, 600)
    labels = node["labels"]
    assert labels["slurm.node"] == "n3" and labels["slurm.partition"] == "main"
    assert labels["pool"] == "a" and labels["slurm.job"] in there.slurm_jobs()
    assert labels["slurm.feature/rack2"] == labels["slurm.feature/n3"] == "yes"
    assert "ends in 29m" in there.events()


@pytest.mark.soak  # a node that ends, as at its time limit
def test_a_cancelled_allocation_is_a_node_that_ends_and_costs_no_retry(there: Site) -> None:
    there.supply()
    gang = there.run(FOR_EVER, "-n", "2", "--retries", "0")
    there.until_job(gang, "running")
    there.real.run("scancel", holders(there, gang)[0])
    there.until("the second attempt", lambda: there.job(gang)["attempt"] == 2)
    there.until_job(gang, "running")
    # It has no retry to use up, so the second attempt cost none. Its node is lost, or says that it
    # ends and the gang leaves it before: whichever comes first.


@pytest.mark.soak  # Slurm takes half a minute to see it
def test_a_machine_that_loses_its_power_is_replaced(there: Site) -> None:
    there.supply(nodelist="n1", most=1)
    job = there.run(FOR_EVER)
    there.until_job(job, "running")
    there.real.kill("n1")
    try:
        there.until("Slurm to notice", lambda: "pool-1 died" in there.events())
        there.supply(most=1)  # anywhere
        there.until("the second attempt", lambda: there.job(job)["attempt"] == 2)
        there.until_job(job, "running")
    finally:
        there.real.start("n1")
        there.real.wait("n1", lambda: "n1 idle" in _machines(there.real))


def test_jobs_leave_a_node_before_its_time_limit(there: Site) -> None:
    there.supply(lasts="30m", most=1)
    job = there.run(FOR_EVER, "--time-limit", "20m", "--preemptible")
    there.until_job(job, "running")
    (holder,) = holders(there, job)
    end_s = int(time.time()) + 30
    soon = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end_s))
    there.real.run("scontrol", "update", f"JobId={holder}", f"EndTime={soon}")
    there.until("the job to leave", lambda: there.job(job)["state"] not in ("running", "stopping"))
    said = there.shoal("events", "--job", job)
    assert "its node is being drained" in said and "(time limit of Slurm job" in said, said
    told = there.shoal("events", "--job", job, "--json").splitlines()
    events = [json.loads(line)["event"] for line in told]
    left_ms = next(one["at_ms"] for one in events if one["event"] == "JobRequeued")
    assert left_ms < end_s * 1000, "it left before the end"


def test_while_slurmctld_is_away_nodes_work_and_it_is_said(there: Site) -> None:
    there.supply(most=3)
    job = there.run(FOR_EVER)
    there.until_job(job, "running")
    there.real.stop("slurmctld")
    try:
        there.until("the alarm", lambda: "slurmctld does not answer" in there.shoal("supply"))
        assert there.job(job)["state"] == "running"
        waiting = there.run("true", "-n", "2")
        assert "slurmctld does not answer" in there.shoal("why", waiting)
    finally:
        there.real.start("slurmctld")
    there.until("it to be over", lambda: "does not answer" not in there.shoal("supply"))
    assert there.job(job)["attempt"] == 1
    assert there.until_job(waiting, "succeeded", "failed")["state"] == "succeeded"


def test_a_bad_partition_is_said_and_the_next_policy_is_tried_at_once(there: Site) -> None:
    there.supply(partition="nope")
    job = there.run("true")
    there.until("the reason", lambda: "partition: " in there.shoal("why", job))
    said = there.shoal("why", job)
    assert "nope" in said and "there are main, short" in said, said
    there.supply(partition="main")
    assert there.until_job(job, "succeeded", "failed")["state"] == "succeeded"


def _machines(real: Slurm) -> str:
    with contextlib.suppress(RuntimeError):
        return real.run("sinfo", "--noheader", "--Node", "--format=%N %T")
    return ""


def test_an_ordinary_user_ran_all_this(there: Site) -> None:
    assert there.uid != 0 or not Path("/usr/bin/python3").exists()
