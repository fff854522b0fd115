"""A policy is data: it changes by an event, at once, and disturbs nothing that runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.policies import SHIPPED
from shoal.core.scheduling.functions import FUNCTIONS
from shoal.core.state.apply import replay
from shoal.core.state.events.cluster import PolicyChanged
from shoal.core.state.events.runs import JobPlaced
from shoal.core.state.load import restore
from shoal.core.state.state import Snapshot, State
from shoal.model.job import Phase
from shoal.model.policy import Policy, Preempt, Tenant, problem_with
from tests.core.build import POLICY, Cluster, kinds
from tests.core.test_apply import image


@pytest.mark.parametrize("policy", SHIPPED.values(), ids=list(SHIPPED))
def test_every_shipped_policy_names_things_that_exist(policy: Policy) -> None:
    assert policy.order in FUNCTIONS.orders
    assert policy.placement in FUNCTIONS.placements
    assert problem_with(policy) is None
    assert msgspec.json.decode(msgspec.json.encode(policy), type=Policy) == policy


def change(cluster: Cluster, **fields: Any) -> None:
    cluster.policy = msgspec.structs.replace(cluster.policy, **fields)
    cluster.step()


def test_a_change_is_one_event_and_the_same_policy_is_none() -> None:
    cluster = Cluster()
    cluster.step()
    change(cluster, order="fifo")
    assert kinds(cluster.last.events) == ["PolicyChanged"]
    change(cluster, order="fifo")
    assert cluster.last.events == []
    assert cluster.state.policy.order == "fifo"


def starts(cluster: Cluster) -> list[str]:
    return [event.job for event in cluster.log if isinstance(event, JobPlaced)]


def test_those_who_wait_take_new_places_under_a_new_order() -> None:
    cluster = Cluster(msgspec.structs.replace(POLICY, order="fifo"))
    cluster.join("a", gpus=1)
    first = cluster.run(gpus=1)
    for estimate_ms in (9_000, 500, 3_000):
        cluster.submit(gpus=1, estimate_ms=estimate_ms)
    change(cluster, order="srtf")
    for job_id in (first, "j3", "j4", "j2"):
        cluster.end(job_id)
        cluster.deliver()
        cluster.hear("a")
    assert starts(cluster) == ["j1", "j3", "j4", "j2"]


def test_a_retry_that_is_not_yet_due_waits_on_under_a_new_order() -> None:
    cluster = Cluster(msgspec.structs.replace(POLICY, order="fifo"))
    cluster.join("a", gpus=1)
    job_id = cluster.run(gpus=1, restart="on-failure", retries=1, backoff_ms=5_000)
    cluster.end(job_id, code=1)
    change(cluster, order="srtf")
    assert cluster.job(job_id).phase is Phase.WAITING
    cluster.wait(4_999)
    assert cluster.hear("a").events == []
    cluster.wait(1)
    cluster.hear("a")
    assert cluster.job(job_id).phase is Phase.STARTING


def test_a_change_keeps_claims_and_all_that_runs() -> None:
    """Found by reading: whoever room was being made for stood in the queue a second time."""
    cluster = Cluster(msgspec.structs.replace(POLICY, run_ms_min=0))
    cluster.join("a", gpus=2)
    low = cluster.run(gpus=1, preemptible=True)
    calm = cluster.run(gpus=1)
    high = cluster.submit(gpus=1, priority=1)
    assert high in cluster.state.claims
    change(cluster, order="srtf", preempt=Preempt.NEVER)
    cluster.deliver()
    cluster.end(low, code=143)
    assert cluster.job(high).phase is Phase.STARTING
    assert cluster.job(calm).phase is Phase.RUNNING


def test_another_tree_of_tenants_keeps_what_was_used() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    for tenant in ("anna", "ben"):
        job_id = cluster.run(gpus=2, tenant=tenant)
        cluster.wait(10_000)
        cluster.end(job_id)
    own = dict(cluster.state.accounts.own)
    tenants = (Tenant(name="lab"), *(Tenant(name=name, parent="lab") for name in own))
    change(cluster, tenants=tenants)
    assert cluster.state.accounts.own == own
    total = cluster.state.accounts.sums["lab"]
    assert total.usage == pytest.approx(sum(account.usage for account in own.values()), rel=0.01)


def test_the_log_of_a_change_leads_to_the_same_state_with_or_without_a_snapshot() -> None:
    cluster = Cluster(msgspec.structs.replace(POLICY, run_ms_min=0, order="fifo", reservations=2))
    cluster.join("a", gpus=2)
    cluster.run(gpus=1, preemptible=True, estimate_ms=5_000)
    for _ in range(3):
        done = cluster.run(gpus=1, tenant="guest")
        cluster.wait(700)
        cluster.end(done)
    cluster.run(gpus=1, estimate_ms=9_000)
    cluster.submit(gpus=2)
    cluster.submit(gpus=1, priority=5, tenant="guest")
    state = cluster.state
    assert state.claims
    assert state.reservations
    assert state.estimates.groups
    assert state.accounts.own["guest"].usage > 0
    half = len(cluster.log)
    snapshot = msgspec.json.decode(image(state), type=Snapshot)
    change(cluster, order="srsf", tenants=(Tenant(name="guest", quota_gpus=1),))
    assert any(isinstance(event, PolicyChanged) for event in cluster.log[half:])
    whole = replay(State(), cluster.log)
    restored = replay(restore(snapshot), cluster.log[half:])
    for other in (whole, restored):
        assert image(other) == image(cluster.state)
        assert other.queue.lanes == cluster.state.queue.lanes
        assert other.accounts.sums.keys() == cluster.state.accounts.sums.keys()
        assert [room.level for room in other.rooms] == [r.level for r in cluster.state.rooms]
