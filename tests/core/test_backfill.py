"""Room set aside in time: gaps are filled, and nobody at the front starts later for it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from shoal.core.answers.why import waiting_reason
from shoal.core.policies import SHIPPED
from shoal.core.state.events.queue import JobReserved
from shoal.core.state.events.runs import JobPlaced
from shoal.model.job import Phase
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy, Preempt
from shoal.model.reason import render
from tests.core.build import Cluster, node_spec
from tests.core.clockwork import Clockwork

POLICY = Policy(
    order="fifo",
    preempt=Preempt.NEVER,
    reservations=1,
    patience_ms=10**9,
    silent_after_ms=10**9,
    grace_ms=10**9,
)


def blocked(policy: Policy = POLICY, **more_nodes: int) -> Cluster:
    """On a, one of two GPUs is busy for ten seconds; j2 waits for both of them."""
    cluster = Cluster(policy)
    cluster.join("a", gpus=2)
    cluster.run(gpus=1, estimate_ms=10_000)
    for name, gpus in more_nodes.items():
        cluster.join(name, gpus=gpus)
    cluster.submit(gpus=2, estimate_ms=10_000)
    return cluster


def where(cluster: Cluster, job_id: str) -> str:
    job = cluster.job(job_id)
    return job.members[0].slice.node if job.members else job.phase.value


def test_a_blocked_job_is_promised_the_first_moment_at_which_it_fits() -> None:
    cluster = blocked()
    (promise,) = (event for event in cluster.log if isinstance(event, JobReserved))
    assert (promise.job, promise.start_ms, promise.nodes) == ("j2", cluster.now_ms + 10_000, ("a",))
    cluster.wait(10_000)
    cluster.end("j1")
    assert cluster.job("j2").phase is Phase.STARTING
    assert cluster.state.reservations == {}


def test_a_job_that_is_done_in_time_fills_the_gap() -> None:
    cluster = blocked()
    assert where(cluster, cluster.submit(gpus=1, estimate_ms=10_000)) == "a"


@pytest.mark.parametrize("wish", [{"estimate_ms": 10_001}, {"time_limit_ms": 10_001}, {}])
def test_a_job_that_is_not_or_of_which_nobody_knows_does_not(wish: dict[str, Any]) -> None:
    cluster = blocked()
    assert where(cluster, cluster.submit(gpus=1, **wish)) == "waiting"


def test_who_would_take_too_long_goes_where_nothing_is_set_aside() -> None:
    cluster = blocked(b=1)
    assert where(cluster, cluster.submit(gpus=1, estimate_ms=99_000)) == "b"


def test_the_first_of_its_kind_that_is_done_in_time_goes_before_its_brothers() -> None:
    cluster = blocked()
    slow = cluster.submit(gpus=1, estimate_ms=99_000)
    quick = cluster.submit(gpus=1, estimate_ms=5_000)
    assert (where(cluster, slow), where(cluster, quick)) == ("waiting", "a")


def test_a_time_limit_is_a_promise_that_one_may_rely_on() -> None:
    cluster = blocked()
    assert where(cluster, cluster.submit(gpus=1, time_limit_ms=10_000)) == "a"


def test_without_reservations_everybody_fills_every_gap() -> None:
    cluster = blocked()
    cluster.policy = msgspec.structs.replace(POLICY, reservations=0)
    assert where(cluster, cluster.submit(gpus=1)) == "a"


def test_under_fifo_nobody_overtakes_not_even_into_a_gap() -> None:
    cluster = blocked(SHIPPED["fifo"], b=1)
    assert where(cluster, cluster.submit(gpus=1, estimate_ms=1)) == "waiting"


def random_queue(seed: int, policy: Policy) -> Clockwork:
    """Gangs of all shapes whose users know exactly how long they run."""
    rng = random.Random(seed)
    sizes = [rng.choice((1, 2, 4)) for _ in range(rng.randint(1, 4))]
    nodes = [node_spec(f"n{n}", gpus=gpus, place=f"b/r{n % 2}") for n, gpus in enumerate(sizes)]
    cluster = Clockwork(policy, *nodes)
    for _ in range(rng.randint(5, 25)):
        gpus, members = rng.choice((0, 1, 1, 2)), rng.randint(1, 5)
        while gpus and sum(size // gpus for size in sizes) < members:
            gpus, members = gpus // 2 or 1, members - 1
        run_ms = rng.choice((1_000, 7_000, 30_000))
        cluster.plan(
            1_000 + rng.randrange(60_000),
            run_ms,
            gpus=gpus,
            gpu_milli=rng.choice((1000, 400)) if gpus == 1 else 1000,
            cpu_milli=rng.choice((0, 1_000)),
            members=max(1, members),
            estimate_ms=run_ms,
            whole_nodes=False,
        )
    cluster.go_on()
    return cluster


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.soak) for first in (40, 80))]
)
def test_with_exact_times_the_first_in_line_starts_no_later_than_it_was_promised(
    first: int,
) -> None:
    """In order of submission and with one reservation: who is promised a start stays first until
    it has started, and whatever overtakes it is gone by then or elsewhere."""
    promised = overtaken = 0
    for seed in range(first, first + 40):
        cluster = random_queue(seed, POLICY)
        starts = cluster.starts
        for job_id, promised_ms in cluster.promises.items():
            assert starts[job_id] <= promised_ms, f"seed {seed}: {job_id}"
            promised += 1
        numbers = [int(job_id[1:]) for job_id in sorted(starts, key=lambda job: starts[job])]
        overtaken += numbers != sorted(numbers)
    assert promised > 100
    assert overtaken > 10


def test_one_step_places_no_more_than_the_policy_allows_when_a_promised_job_starts() -> None:
    cluster = Cluster(msgspec.structs.replace(POLICY, placements_per_step_max=2))
    cluster.join("a", gpus=4)
    cluster.join("b", gpus=1, gpu_model="T4")
    first = cluster.run(gpus=4, estimate_ms=10_000)
    cluster.run(gpus=1, gpu_models=("T4",), estimate_ms=10**6)
    cluster.submit(gpus=2, estimate_ms=10_000)  # room is set aside for it
    for _ in range(2):
        cluster.submit(gpus=1, estimate_ms=10_000)
    # Its lane stays known to fit nowhere, so the next walk covers only a part of the queue.
    cluster.submit(gpus=1, gpu_models=("T4",))
    cluster.wait(5_000)  # earlier than promised: no look at the whole queue is due
    before = len(cluster.log)
    cluster.end(first)
    placed = [event for event in cluster.log[before:] if isinstance(event, JobPlaced)]
    assert [event.job for event in placed] == ["j3", "j4"]


def test_a_job_behind_another_like_it_does_not_hold_the_queue() -> None:
    cluster = Cluster(msgspec.structs.replace(POLICY, patience_ms=3_000))
    cluster.join("a", gpus=1)
    cluster.join("b", gpus=1)
    first = cluster.run(members=2, gpus=1)
    behind = cluster.submit(members=2, gpus=1)  # the first in line
    cluster.wait(4_000)
    cluster.submit(gpus=1, priority=5)
    cluster.intend("b", NodeIntent.DRAINING)
    cluster.exit(first, 143, 0)
    cluster.exit(first, 143, 1)
    cluster.hear("a", "b")
    cluster.intend("b", NodeIntent.OPEN)
    assert list(cluster.state.reservations) == [behind, first]  # now `first` stands before it
    assert cluster.job(cluster.submit()).phase is Phase.STARTING


# -- beside what is set aside ------------------------------------------------------------------


def with_a_blocked_gang(policy: Policy = POLICY, **gang: Any) -> Cluster:
    """Three nodes with 8 GPUs and 16 CPUs, one of which holds a job for an hour; a gang of 3 x 8
    GPUs waits for it."""
    cluster = Cluster(policy)
    for name in "abc":
        cluster.join(name, gpus=8, cpus=16)
    cluster.run(gpus=8, cpu_milli=2_000, estimate_ms=3_600_000)
    waits: dict[str, Any] = {"members": 3, "gpus": 8, "cpu_milli": 2_000, **gang}
    blocked_id = cluster.submit(**waits)
    assert cluster.state.reservations[blocked_id].members == (1, 1, 1)
    return cluster


def test_cpu_work_runs_on_the_idle_cpus_of_nodes_that_a_gpu_gang_waits_for() -> None:
    cluster = with_a_blocked_gang()
    small = [cluster.submit(cpu_milli=1_000) for _ in range(43)]
    started = [job_id for job_id in small if cluster.job(job_id).phase is Phase.STARTING]
    assert len(started) == 3 * 14, "the gang needs 2 of 16 CPUs on each node"
    gang, last = "j2", small[-1]
    why = render(waiting_reason(cluster.state, cluster.job(last), cluster.policy, cluster.now_ms))
    assert gang in why and "set aside" in why, why
    cluster.wait(3_600_000)
    cluster.end("j1")
    assert cluster.job(gang).phase is Phase.STARTING, "nothing delayed it"


def test_a_gang_takes_as_many_members_beside_another_as_cannot_delay_it() -> None:
    cluster = with_a_blocked_gang(cpu_milli=10_000)
    assert cluster.job(cluster.submit(members=19, cpu_milli=1_000)).phase is Phase.WAITING
    wide = cluster.job(cluster.submit(members=18, cpu_milli=1_000))
    assert Counter(member.slice.node for member in wide.members) == {"a": 6, "b": 6, "c": 6}
    cluster.wait(3_600_000)
    cluster.end("j1")
    assert cluster.job("j2").phase is Phase.STARTING


@pytest.mark.parametrize(
    "wish",
    [
        {"gpus": 1, "cpu_milli": 0},
        {"cpu_milli": 14_500},
        {"memory_mb": 300, "cpu_milli": 0},
        {"whole_nodes": True, "cpu_milli": 1_000},
    ],
)
def test_what_would_take_something_that_the_gang_needs_still_waits(wish: dict[str, Any]) -> None:
    cluster = with_a_blocked_gang(memory_mb=800)
    assert cluster.job(cluster.submit(**wish)).phase is Phase.WAITING


def test_nobody_uses_the_rest_of_a_node_that_is_wanted_as_a_whole() -> None:
    cluster = with_a_blocked_gang(whole_nodes=True)
    assert cluster.job(cluster.submit(cpu_milli=1_000)).phase is Phase.WAITING


def test_gpus_that_are_too_many_for_the_gang_are_not_set_aside() -> None:
    """On a, two of eight GPUs are busy for ten seconds; then j2 will need seven of them."""
    cluster = Cluster(POLICY)
    cluster.join("a", gpus=8)
    cluster.run(gpus=2, cpu_milli=0, estimate_ms=10_000)
    cluster.submit(gpus=7, cpu_milli=0, estimate_ms=10_000)
    one = cluster.submit(gpus=1, cpu_milli=0)
    assert where(cluster, one) == "a"
    assert where(cluster, cluster.submit(gpus=1, cpu_milli=0)) == "waiting"
    cluster.wait(10_000)
    cluster.end("j1")
    assert cluster.job("j2").phase is Phase.STARTING


def test_cpu_work_runs_beside_a_gpu_gang_for_which_the_queue_is_held() -> None:
    """It has waited for longer than the policy's patience, and nobody knows when it starts."""
    cluster = Cluster(msgspec.structs.replace(POLICY, patience_ms=3_000))
    for name in "ab":
        cluster.join(name, gpus=8, cpus=16)
    first = cluster.run(gpus=8, cpu_milli=2_000)
    gang = cluster.submit(members=2, gpus=8, cpu_milli=10_000)
    cluster.wait(4_000)
    cluster.hear("a", "b")
    assert cluster.job(cluster.submit(gpus=1, cpu_milli=0)).phase is Phase.WAITING
    small = [cluster.submit(cpu_milli=1_000) for _ in range(14)]
    started = [job_id for job_id in small if cluster.job(job_id).phase is Phase.STARTING]
    assert len(started) == 12, "of 16 CPUs on each node, the gang needs 10"
    why = render(
        waiting_reason(cluster.state, cluster.job(small[-1]), cluster.policy, cluster.now_ms)
    )
    assert f"the queue is held for {gang}" in why
    cluster.end(first)
    assert cluster.job(gang).phase is Phase.STARTING, "nothing delayed it"
