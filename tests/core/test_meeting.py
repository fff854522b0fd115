"""Ports of gangs and replicas: nobody knows the next one, and who needs none takes none."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest

from shoal.core.nodebook import NodeBook
from shoal.core.scheduling.meeting import AGAIN
from shoal.model.commands import Launch
from shoal.model.health import Standing
from shoal.model.job import Fault, Job, MemberRef, Outcome, Restart
from shoal.model.policy import Policy
from shoal.tick import Tick
from tests.core.build import Cluster, node_spec

PAIR = {"members": 2, "cpu_milli": 100}


def port(job: Job) -> int:
    return int(job.master.rpartition(":")[2])


def drawn(seed: int, count: int = 20) -> list[int]:
    """The ports of a number of gangs, if every step has the same seed."""
    cluster = Cluster()
    cluster.controller.draw = partial(int, seed)
    cluster.join("a", cpus=50)
    return [port(cluster.job(cluster.submit(**PAIR))) for _ in range(count)]


def test_ports_lie_in_the_policys_range_and_below_those_of_kubernetes() -> None:
    policy = Policy()
    assert all(policy.port_first <= one < 30_000 for one in drawn(7))
    assert policy.port_first + policy.port_count <= 30_000


def test_who_has_seen_a_port_does_not_know_the_next() -> None:
    one, other = drawn(1), drawn(2)
    assert len(set(one)) == len(one)
    assert not set(one) & set(other), "the seed decides, which nobody but the step has"
    apart = [abs(after - before) for before, after in pairwise(one)]
    assert max(apart) > 1_000, "not one after the other"


def test_a_seed_is_drawn_for_every_step() -> None:
    cluster = Cluster()
    seeds = iter(range(1, 100))
    cluster.controller.draw = partial(next, seeds)
    cluster.join("a", cpus=50)
    cluster.submit(**PAIR)
    assert next(seeds) == 3
    assert isinstance(cluster.controller, Tick)


def test_all_ports_of_a_small_range_are_found() -> None:
    cluster = Cluster(Policy(port_first=5_000, port_count=12))
    cluster.join("a", cpus=50)
    given = [port(cluster.job(cluster.submit(**PAIR))) for _ in range(12)]
    assert sorted(given) == list(range(5_000, 5_012))
    assert port(cluster.job(cluster.submit(**PAIR))) in given, "the node sees that it is taken"


def test_a_job_that_is_alone_takes_no_port_and_torchrun_in_it_still_meets_its_own() -> None:
    cluster = Cluster()
    cluster.join("a", cpus=50)
    ports = []
    for _ in range(3):
        job = cluster.job(cluster.submit())
        assert (job.master, job.serves_at) == ("", "")
        (launch,) = (one for one in cluster.last.commands if isinstance(one, Launch))
        assert launch.env["PET_MASTER_ADDR"] == "a.test"
        ports.append(int(launch.env["PET_MASTER_PORT"]))
    assert not cluster.state.masters
    assert len(set(ports)) == 3


def test_the_next_attempt_of_a_job_that_is_alone_meets_elsewhere() -> None:
    cluster = Cluster()
    cluster.join("a")
    job = cluster.run(restart=Restart.ON_FAILURE, retries=1, backoff_ms=0)
    first = cluster.books["a"].alive[MemberRef(job, 1, 0)].env["PET_MASTER_PORT"]
    cluster.end(job, 1)
    cluster.wait(100_000)
    cluster.hear("a")
    cluster.deliver()
    second = cluster.books["a"].alive[MemberRef(job, 2, 0)].env["PET_MASTER_PORT"]
    assert int(second) - int(first) in (AGAIN, AGAIN - cluster.policy.port_count)


@pytest.mark.parametrize("fault", [Fault.PORT, Fault.TAKEN])
def test_a_port_that_another_process_has_costs_nothing_and_the_next_is_another(
    fault: Fault,
) -> None:
    cluster = Cluster()
    cluster.join("a")
    job = cluster.submit(**PAIR) if fault is Fault.PORT else cluster.run(**PAIR)
    cluster.deliver()
    seen = {port(cluster.job(job))}
    for attempt in range(1, 4):
        book: NodeBook = cluster.books["a"]
        for member in range(2):
            book.exited(MemberRef(job, attempt, member), 127, "port 1 is taken", fault=fault)
        cluster.hear("a")
        cluster.deliver()
        assert cluster.job(job).failures == 0
        assert cluster.job(job).losses == attempt
        assert cluster.job(job).attempt == attempt + 1, cluster.job(job).why
        seen.add(port(cluster.job(job)))
    assert len(seen) == 4
    assert cluster.node("a").record.standing is Standing.OK, "whoever took it is not the node"


def test_a_job_that_must_not_run_twice_does_not_after_its_port_was_taken_from_it() -> None:
    for fault, outcome in ((Fault.PORT, None), (Fault.TAKEN, Outcome.FAILED)):
        cluster = Cluster()
        cluster.bring(node_spec("a"))
        job = cluster.submit(restart=Restart.NEVER, **PAIR)
        cluster.deliver()
        for member in range(2):
            ref = MemberRef(job, 1, member)
            cluster.books["a"].exited(ref, 137, "port 1 is taken", fault=fault)
        cluster.hear("a")
        assert cluster.job(job).outcome is outcome, fault


def test_a_job_that_finds_no_free_port_does_not_use_up_its_losses_within_seconds() -> None:
    cluster = Cluster()
    cluster.join("a")
    job = cluster.submit(**PAIR)
    began_ms, attempts = cluster.now_ms, 0
    while cluster.job(job).losses < 10:
        cluster.deliver()
        for ref in list(cluster.books["a"].alive):
            cluster.books["a"].exited(ref, 127, "port 1 is taken", fault=Fault.PORT)
            attempts += 1
        cluster.hear("a")
        cluster.wait(100)
    assert attempts == 20
    assert cluster.now_ms - began_ms > 60_000
    assert "restarts elsewhere in 30s (does not count as a retry)" in cluster.job(job).why
