"""What the scheduler promises, shown with real processes: one cluster, one promise at a time."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from harness.waiting import WAIT_S, until

from shoal.control.home import ClusterConfig
from shoal.core.state.events.runs import JobStopping
from shoal.model.node import NodeSpec
from shoal.model.policy import Policy, Tenant
from shoal.model.service import Scale
from shoal.model.views import JobView
from tests.live.cluster import Live, live_cluster
from tests.live.serving import Serving, need_gateway, replica_ports

# Ends at once when it is told to stop, and says that all is well: it has not done its work.
ENDLESS = "trap 'exit 0' TERM; while :; do sleep 0.1; done"
# Computes for a tenth of the time, which is ten times as much as counts.
BUSY = """
trap "exit 0" TERM
while :; do n=0; while [ $n -lt 20000 ]; do n=$((n+1)); done; sleep 0.2; done
"""
WILLING = {"preemptible": True, "checkpoint_ms": 1_000, "cpu_milli": 0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Live]:
    nodes = tuple(
        NodeSpec(id=f"n{number}", gpus=2, cpu_milli=8_000, memory_mb=4_000, place=place)
        for number, place in enumerate(("b1/r1", "b1/r1", "b1/r2"), 1)
    )
    with live_cluster(config=ClusterConfig(nodes=nodes, port=0)) as live:
        yield live


@pytest.fixture
def live(cluster: Live) -> Iterator[Live]:
    """Nobody is protected by having just started, and moving costs nothing."""
    before = cluster.client.policy()
    set_policy(cluster, run_ms_min=0, move_cost_ms=0)
    yield cluster
    for service in cluster.client.services():
        cluster.client.stop_service(service.name)
    for job in cluster.client.jobs():
        cluster.client.cancel(job.id)
    until(lambda: not cluster.client.jobs())
    cluster.client.set_policy(before)


def set_policy(live: Live, **fields: object) -> Policy:
    policy = msgspec.structs.replace(live.client.policy(), **fields)
    live.client.set_policy(policy)
    return policy


def runs(live: Live, **fields: object) -> str:
    job_id = live.run(ENDLESS, **{"gpus": 1, "cpu_milli": 0, **fields})
    assert live.wait(job_id, "running") == "running"
    return job_id


def nodes_of(job: JobView) -> set[str]:
    return {member.node for member in job.gang}


def becomes(live: Live, job_id: str, *, size: int, attempt: int) -> None:
    def so() -> bool:
        job = live.client.job(job_id)
        return job.state == "running" and (len(job.gang), job.attempt) == (size, attempt)

    until(so, f"{job_id} runs with {size} members", lambda: live.client.job(job_id))


def test_parts_of_a_gpu_are_shared_and_no_more_than_whole(live: Live) -> None:
    halves = [live.client.job(runs(live, gpu_milli=500)) for _ in range(12)]
    places = [(job.gang[0].node, job.gang[0].gpus[0]) for job in halves]
    assert all(places.count(place) == 2 for place in places)
    waits = live.run(ENDLESS, gpus=1, gpu_milli=500, cpu_milli=0)
    assert live.client.job(waits).state == "waiting"
    live.client.cancel(halves[0].id)
    assert live.wait(waits, "running") == "running"
    job = live.client.job(waits)
    assert (job.gang[0].node, job.gang[0].gpus[0]) == places[0]


def test_a_gang_that_insists_on_a_rack_gets_one_or_waits(live: Live) -> None:
    blocker = runs(live, gpus=2)
    gang = {"members": 2, "gpus": 2, "within": "rack", "within_required": True}
    if nodes_of(live.client.job(blocker)) == {"n3"}:
        assert nodes_of(live.client.job(runs(live, **gang))) == {"n1", "n2"}
        return
    waits = live.run(ENDLESS, cpu_milli=0, **gang)
    job = live.client.job(waits)
    assert job.state == "waiting"
    assert "in one rack" in live.client.why(waits).why
    live.client.cancel(blocker)
    assert live.wait(waits, "running") == "running"
    assert nodes_of(live.client.job(waits)) == {"n1", "n2"}


def test_a_job_of_higher_priority_takes_the_room_and_the_other_runs_again(live: Live) -> None:
    low = runs(live, members=3, gpus=2, **WILLING)
    high = live.run("sleep 1", gpus=2, priority=10)
    assert live.wait(high) == "succeeded"
    becomes(live, low, size=3, attempt=2)


def test_a_job_that_must_not_restart_is_stopped_for_nobody(live: Live) -> None:
    never = runs(live, members=3, gpus=2, restart="never", **WILLING)
    high = live.run(ENDLESS, gpus=2, priority=10)
    assert "no node has " in live.client.why(high).why
    assert (live.client.job(never).state, live.client.job(never).attempt) == ("running", 1)


def test_a_tenant_takes_back_what_others_borrowed_of_its_quota(live: Live) -> None:
    set_policy(live, tenants=(Tenant(name="red", quota_gpus=4), Tenant(name="blue", quota_gpus=2)))
    borrowed = [runs(live, tenant="blue", **WILLING) for _ in range(6)]
    red = [live.run(ENDLESS, gpus=1, cpu_milli=0, tenant="red") for _ in range(4)]
    for job_id in red:
        assert live.wait(job_id, "running", WAIT_S) == "running"
    states = [live.client.job(job_id).state for job_id in borrowed]
    assert (states.count("running"), states.count("waiting")) == (2, 4)
    more = live.run(ENDLESS, gpus=1, cpu_milli=0, tenant="red")
    assert live.client.job(more).state == "waiting"  # beyond its own quota


def test_an_elastic_gang_shrinks_as_far_as_it_must_and_grows_again(live: Live) -> None:
    wide = runs(live, members=1, members_max=6, **WILLING)
    becomes(live, wide, size=6, attempt=1)
    first = live.run(ENDLESS, gpus=1, cpu_milli=0, priority=10)
    assert live.wait(first, "running") == "running"
    becomes(live, wide, size=5, attempt=2)
    live.client.cancel(first)
    becomes(live, wide, size=6, attempt=3)


def test_training_gives_a_service_the_gpus_it_needs_and_takes_them_back(live: Live) -> None:
    """Two replicas come at once: the gang makes room for both with one restart."""
    need_gateway()
    set_policy(live, **replica_ports())
    wide = runs(live, members=1, members_max=6, **WILLING)
    becomes(live, wide, size=6, attempt=1)
    serving = Serving(live, "chat")
    replica = msgspec.structs.replace(serving.replica("v1"), gpus=1, cpu_milli=0, priority=10)
    serving.put(replica, Scale(least=2, most=2))
    view = serving.settles()
    assert (view.ready, serving.ask().body) == (2, "v1")
    becomes(live, wide, size=4, attempt=2)
    stops = [
        record.event.why
        for record in live.client.why(wide).events
        if isinstance(record.event, JobStopping)
    ]
    assert len(stops) == 1 and "chat" in stops[0], stops
    live.client.stop_service("chat")
    until(serving.gone)
    # The replicas need not end at the same moment: it may grow once, or once for each.
    until(lambda: len(live.client.job(wide).gang) == 6)
    assert live.wait(wide, "running") == "running"


@pytest.mark.soak  # its times are seconds, which a busy machine stretches beyond the gap
def test_a_short_job_runs_in_the_gap_before_a_reserved_gang_which_starts_as_predicted(
    live: Live,
) -> None:
    """Nobody says how long a job takes: that is learned from three of each name."""

    def sleeps(name: str, seconds: int, members: int = 1) -> str:
        script = f"exec sleep {seconds}"
        return live.run(script, name=name, members=members, gpus=1, cpu_milli=0)

    for job in [sleeps("epoch", 6) for _ in range(3)] + [sleeps("probe", 1) for _ in range(3)]:
        assert live.wait(job) == "succeeded"
    for job in [sleeps("epoch", 6) for _ in range(5)]:
        live.wait(job, "running")  # one of six GPUs is free
    gang = sleeps("gang", 1, members=6)
    long, short = sleeps("epoch", 6), sleeps("probe", 1)
    said = live.client.why(gang)
    assert said.early_ms is not None
    assert said.late_ms is not None
    assert live.wait(short) == "succeeded"
    assert live.wait(gang) == "succeeded"
    live.wait(long, "running")
    gap, reserved, after = (live.client.job(job) for job in (short, gang, long))
    assert gap.finished_ms is not None
    assert reserved.placed_ms is not None
    assert after.placed_ms is not None
    assert gap.finished_ms <= reserved.placed_ms < after.placed_ms
    # A busy machine may be late by a little; what was not learned would be off by the whole run.
    assert said.early_ms - 1_000 <= reserved.placed_ms <= said.late_ms + 3_000


def test_a_willing_job_moves_so_that_a_larger_one_fits(live: Live) -> None:
    """Each node has one GPU left: three in all, and no two of them together."""
    fill = [runs(live, **WILLING) for _ in range(6)]
    views = {job_id: live.client.job(job_id) for job_id in fill}
    for node in ("n1", "n2", "n3"):
        live.client.cancel(next(j for j, view in views.items() if nodes_of(view) == {node}))
    until(lambda: len(live.client.jobs()) == 3)
    large = live.run(ENDLESS, gpus=2, cpu_milli=0)
    assert live.wait(large, "running") == "running"
    left = [job for job in live.client.jobs() if job.id in fill]
    until(lambda: all(live.client.job(job.id).state == "running" for job in left))
    assert sorted(live.client.job(job.id).attempt for job in left) == [1, 1, 2]


def test_gpus_that_nobody_uses_are_taken_back(live: Live) -> None:
    set_policy(live, idle_reclaim_ms=1_000, idle_ends=True)
    idle = live.run("exec sleep 1000", gpus=1, cpu_milli=0)
    busy = live.run(BUSY, gpus=1, cpu_milli=0)
    assert live.wait(idle) == "cancelled"
    assert "not used its GPUs" in live.client.job(idle).why
    assert live.client.job(busy).state == "running"
