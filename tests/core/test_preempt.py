"""Who is stopped for whom: as few as can be, those who lose least, and never in circles."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from shoal.core.policies import SHIPPED
from shoal.core.state.expect import ran_ms
from shoal.model.job import Phase, StopCause
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy, Preempt, Tenant
from tests.core.build import Cluster, kinds, node_spec
from tests.core.clockwork import Clockwork, claims, random_history, random_policy

POLICY = Policy(run_ms_min=0, move_cost_ms=10**9, silent_after_ms=10**9, grace_ms=10**9)
WILLING: dict[str, Any] = {"preemptible": True, "cpu_milli": 0}


def cluster_of(*gpus: int, **policy: Any) -> Cluster:
    """Nodes a, b, ... with so many GPUs each."""
    cluster = Cluster(msgspec.structs.replace(POLICY, **policy))
    for name, count in zip("abcdef", gpus, strict=False):
        cluster.join(name, gpus=count)
    return cluster


def stopped(cluster: Cluster) -> list[str]:
    """Jobs that are being stopped for others."""
    causes = (StopCause.PREEMPT, StopCause.RESIZE)
    return [job.id for job in cluster.state.jobs.values() if job.stop_cause in causes]


def let_stop(cluster: Cluster, *jobs: str) -> None:
    """They have saved their work and end."""
    cluster.deliver()
    for job_id in jobs:
        for member in range(len(cluster.job(job_id).members)):
            cluster.exit(job_id, 143, member)
    cluster.hear(*cluster.books)


# -- for whom ------------------------------------------------------------------------------


def test_a_job_of_higher_priority_starts_when_those_stopped_for_it_have_let_go() -> None:
    cluster = cluster_of(2)
    low = cluster.run(gpus=2, **WILLING)
    high = cluster.submit(gpus=2, priority=1)
    assert stopped(cluster) == [low]
    assert "room is being made for it" in cluster.job(high).why or high in cluster.state.claims
    let_stop(cluster, low)
    assert cluster.job(high).phase is Phase.STARTING
    assert cluster.job(low).phase is Phase.WAITING


@pytest.mark.parametrize(
    ("victim", "policy"),
    [
        ({"preemptible": False}, {}),
        ({"restart": "never"}, {}),
        ({"priority": 1}, {}),
        ({"priority": 2}, {}),
        ({}, {"preempt": Preempt.NEVER}),
    ],
)
def test_nobody_is_stopped_who_is_unwilling_or_as_entitled(
    victim: dict[str, Any], policy: dict[str, Any]
) -> None:
    cluster = cluster_of(2, **policy)
    cluster.run(**{"gpus": 2, **WILLING, **victim})
    cluster.submit(gpus=2, priority=1)
    assert stopped(cluster) == []


def test_nobody_is_stopped_in_vain() -> None:
    """With all who may be stopped gone, there would still be too little room."""
    cluster = cluster_of(4)
    cluster.run(gpus=1)
    cluster.run(gpus=2, **WILLING)
    cluster.submit(gpus=4, priority=5)
    assert stopped(cluster) == []


def test_nobody_is_stopped_before_it_has_run_for_the_policys_minimum() -> None:
    cluster = cluster_of(1, run_ms_min=60_000)
    low = cluster.run(gpus=1, **WILLING)
    cluster.wait(10_000)
    cluster.submit(gpus=1, priority=1)
    assert stopped(cluster) == []
    assert cluster.last.wake_ms == cluster.now_ms + 50_000  # and then it is looked at again
    cluster.wait(49_999)
    assert cluster.step().events == []
    cluster.wait(1)
    cluster.step()
    assert stopped(cluster) == [low]


def test_a_tenant_within_its_quota_takes_back_what_was_borrowed() -> None:
    cluster = cluster_of(2, tenants=(Tenant(name="owner", quota_gpus=1),))
    borrowers = [cluster.run(gpus=1, tenant="guest", priority=9, **WILLING) for _ in range(2)]
    cluster.submit(gpus=1, tenant="owner")
    assert len(stopped(cluster)) == 1
    assert stopped(cluster)[0] in borrowers
    cluster.submit(gpus=1, tenant="owner", priority=9)
    assert len(stopped(cluster)) == 1  # more than its quota it would borrow itself


def test_no_more_is_taken_from_a_tenant_than_it_has_borrowed() -> None:
    """Found by simulation: both jobs of a tenant above its quota were stopped for one that then
    stood in the way of the quota, was stopped in turn, and so on forever."""
    cluster = cluster_of(4, tenants=(Tenant(name="owner", quota_gpus=2),))
    cluster.run(gpus=2, tenant="owner", **WILLING)
    beyond = cluster.run(gpus=2, tenant="owner", **WILLING)
    cluster.submit(gpus=4, tenant="guest", priority=9)
    assert stopped(cluster) == []
    cluster.submit(gpus=2, tenant="guest", priority=9)
    assert stopped(cluster) == [beyond]


# -- whom ----------------------------------------------------------------------------------


def test_those_who_turn_out_not_to_be_needed_go_on() -> None:
    """The cheapest is on the wrong node: only the one that has the room is stopped."""
    cluster = cluster_of(2, 2)
    cluster.run(gpus=1, cpu_milli=0)
    dear = cluster.run(gpus=2, **WILLING)
    cluster.wait(9_000)
    cluster.run(gpus=1, **WILLING)
    cluster.wait(1_000)
    cluster.submit(gpus=2, priority=1)
    assert stopped(cluster) == [dear]


def test_the_one_that_loses_the_least_work_is_stopped_first() -> None:
    cluster = cluster_of(1, 1, 1)
    cluster.run(gpus=1, **WILLING)
    saved = cluster.run(gpus=1, checkpoint_ms=5_000, **WILLING)
    cluster.run(gpus=1, checkpoint_ms=60_000, **WILLING)
    cluster.wait(10_100)
    cluster.submit(gpus=1, priority=1)
    assert stopped(cluster) == [saved]


def test_what_is_borrowed_goes_before_what_is_not_however_much_work_is_lost() -> None:
    cluster = cluster_of(1, 1, tenants=(Tenant(name="owner", quota_gpus=2),))
    borrower = cluster.run(gpus=1, tenant="guest", **WILLING)
    cluster.run(gpus=1, tenant="owner", checkpoint_ms=1, **WILLING)
    cluster.wait(10_000)
    cluster.submit(gpus=1, tenant="owner", priority=1)
    assert stopped(cluster) == [borrower]


# -- what becomes of them ------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint_ms", "kept_ms"), [(3_000, 10_000), (0, 0)])
def test_who_checkpoints_keeps_the_work_it_was_asked_to_save(
    checkpoint_ms: int, kept_ms: int
) -> None:
    cluster = cluster_of(1)
    low = cluster.run(gpus=1, checkpoint_ms=checkpoint_ms, **WILLING)
    cluster.wait(10_000)
    cluster.submit(gpus=1, priority=1)
    let_stop(cluster, low)
    job = cluster.job(low)
    assert (job.attained_ms, job.preemptions, job.failures) == (kept_ms, 1, 0)


def test_a_job_that_waits_again_does_not_age_as_if_it_ran() -> None:
    """Found by simulation: under shortest-remaining-first a victim's time seemed to go on, until
    it came before the one that it had made room for."""
    cluster = cluster_of(1)
    low = cluster.run(gpus=1, checkpoint_ms=1, **WILLING)
    cluster.wait(10_000)
    cluster.submit(gpus=1, priority=1)
    let_stop(cluster, low)
    cluster.wait(500_000)
    assert ran_ms(cluster.job(low), cluster.now_ms) == 10_000


def test_nobody_else_gets_the_room_that_is_being_made() -> None:
    cluster = cluster_of(2)
    low = cluster.run(gpus=1, **WILLING)
    other = cluster.run(gpus=1)
    high = cluster.submit(gpus=2, priority=5, estimate_ms=5)
    assert stopped(cluster) == []  # it would be in vain
    cluster.end(other)
    assert stopped(cluster) == [low]
    late = cluster.submit(gpus=1, priority=9)
    assert cluster.job(late).phase is Phase.WAITING
    let_stop(cluster, low)
    assert cluster.job(high).phase is Phase.STARTING
    assert cluster.job(late).phase is Phase.WAITING


def test_a_claim_is_given_up_when_its_node_is_closed_and_the_job_stands_in_line_again() -> None:
    cluster = cluster_of(2)
    low = cluster.run(gpus=2, **WILLING)
    high = cluster.submit(gpus=2, priority=5)
    cluster.intend("a", NodeIntent.CORDONED)
    assert "JobUnclaimed" in kinds(cluster.last.events)
    let_stop(cluster, low)
    assert cluster.state.claims == {}
    assert cluster.job(high).phase is Phase.WAITING
    cluster.intend("a", NodeIntent.OPEN)
    assert cluster.job(high).phase is Phase.STARTING


def test_who_wants_a_whole_node_waits_until_all_others_have_left_it() -> None:
    """Found by thinking: its own slice was free while those stopped for it were still there."""
    cluster = cluster_of(4)
    low = cluster.run(gpus=1, **WILLING)
    high = cluster.submit(gpus=1, cpu_milli=0, priority=5, whole_nodes=True)
    assert stopped(cluster) == [low]
    cluster.step()
    assert cluster.job(high).phase is Phase.WAITING
    let_stop(cluster, low)
    assert cluster.job(high).phase is Phase.STARTING


def test_a_cancelled_beneficiary_lets_go_of_its_claim() -> None:
    cluster = cluster_of(2)
    low = cluster.run(gpus=2, **WILLING)
    high = cluster.submit(gpus=2, priority=5)
    cluster.cancel(high)
    assert cluster.state.claims == {}
    let_stop(cluster, low)
    assert cluster.job(low).phase is Phase.STARTING


# -- over whole histories ------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_in_no_history_do_two_jobs_stop_each_other_or_anybody_stop_for_nothing(first: int) -> None:
    """Fault-free, with random priorities, tenants, quotas, orders and sizes: whoever others were
    stopped for starts, nobody is stopped by one that it stopped, and everybody ends."""
    for seed in range(first, first + 50):
        cluster = random_history(seed, random_policy(seed))
        pairs = Counter(cluster.preemptions)
        assert not cluster.state.jobs, seed
        assert not [pair for pair in pairs if pair[::-1] in pairs], seed
        assert sum(pairs.values()) <= len(cluster.run_ms) ** 2, seed
        assert {end for ends in claims(cluster.log).values() for end in ends} <= {"placed"}, seed


def test_histories_with_stops_in_them_are_not_rare() -> None:
    """Else the property above would say little."""
    histories = [random_history(seed, random_policy(seed)) for seed in range(60)]
    assert sum(bool(cluster.preemptions) for cluster in histories) > 15
    shrinks = [h.job(job) for h in histories for job in h.finished if h.job(job).spec.elastic]
    assert sum(job.preemptions for job in shrinks) > 5


@pytest.mark.parametrize("name", sorted(SHIPPED))
@pytest.mark.parametrize("checkpoint_ms", [0, 60_000])
def test_two_long_jobs_that_take_turns_both_come_to_their_end(
    name: str, checkpoint_ms: int
) -> None:
    """Found by thinking: who starts over each time lost what it had attained, and with it its
    place: two such jobs stopped each other forever."""
    cluster = Clockwork(SHIPPED[name], node_spec("a", gpus=8), tick_ms=60_000)
    for _ in range(2):
        cluster.plan(1_000, 3_000_000, gpus=8, preemptible=True, checkpoint_ms=checkpoint_ms)
    cluster.go_on(7_000_000)
    assert sorted(cluster.ends) == ["j1", "j2"]
    assert len(cluster.preemptions) <= 4


def test_jobs_that_only_wait_for_each_other_take_turns_at_most_once() -> None:
    """Two equals: the first keeps its place, whatever the order."""
    for order in ("fifo", "fair", "srtf", "srsf", "tiresias"):
        policy = msgspec.structs.replace(POLICY, order=order, preempt=Preempt.RANK)
        cluster = Clockwork(policy)
        cluster.join("a", gpus=1)
        for _ in range(2):
            cluster.plan(1_000, 50_000, gpus=1, estimate_ms=50_000, **WILLING)
        cluster.go_on()
        assert cluster.ends == {"j1": 51_000, "j2": 101_000}, order
