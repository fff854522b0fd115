"""Why a job waits and when it starts: one answer, which never denies itself."""

from __future__ import annotations

import re

import msgspec
import pytest
from storm.fuzz import Run, Size

from shoal.core.answers.outlook import NO_TIME, Outlook, outlook
from shoal.core.answers.why import Waits, reason_of
from shoal.core.policies import SHIPPED
from shoal.core.state.events.queue import JobReserved
from shoal.core.state.state import State
from shoal.model.budget import BudgetPeriod, Spending
from shoal.model.job import Phase
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy, Tenant
from shoal.model.reason import render
from tests.core.build import Cluster

HOUR_MS = 3_600_000
HOUR_US = HOUR_MS * 1000
RAW_SECONDS = re.compile(r"\b[0-9.]+ (s|ms|min|h|days)\b")


def told(cluster: Cluster, job_id: str) -> Outlook:
    job = cluster.job(job_id)
    found = outlook(cluster.state, job, cluster.policy, cluster.now_ms)
    assert_agrees(cluster.state, job_id, cluster.policy, cluster.now_ms)
    return found


def assert_agrees(state: State, job_id: str, policy: Policy, now_ms: int) -> None:
    job = state.jobs[job_id]
    found = outlook(state, job, policy, now_ms)
    both = f"{found.why} | {found.start}"
    assert not RAW_SECONDS.search(both), both
    assert both.count("probably start") + both.count("its start cannot be predicted") <= 1, both
    assert (found.early_ms is None) == (found.late_ms is None)
    assert (found.early_ms is not None) == ("probably start" in found.start), both
    if job.phase is not Phase.WAITING:
        assert not found.start
        return
    if found.early_ms is not None and found.late_ms is not None:
        assert now_ms <= found.early_ms <= found.late_ms
        assert job.not_before_ms <= found.early_ms
        assert "nobody" not in both, both
    reason = reason_of(state, job, policy, now_ms)
    kind = reason.kind if reason is not None else None
    if kind in NO_TIME:
        assert not found.start, both
    elif kind not in (Waits.RETRY, Waits.BEGIN):
        assert found.start, both


def test_who_is_held_by_a_budget_is_not_asked_for_an_estimate() -> None:
    cluster = Cluster(Policy(tenants=(Tenant(name="red", budget_gpu_hours=1),)))
    cluster.join("a", gpus=2)
    spent = Spending(tenant="red", period=BudgetPeriod.MONTH, gpu_us=HOUR_US)
    cluster.step(spendings=(spent,))
    found = told(cluster, cluster.submit(gpus=1, tenant="red"))
    assert render(found.why) == "the budget of red is used up; see: shoal report --by tenant"
    assert found == Outlook(found.why)


def test_what_no_open_node_holds_has_no_start() -> None:
    cluster = Cluster()
    assert told(cluster, cluster.submit()) == Outlook("no node has joined the cluster yet")
    cluster.join("a", gpus=2)
    cluster.join("b", gpus=2)
    cluster.run(gpus=2, estimate_ms=HOUR_MS)
    cluster.intend("b", NodeIntent.CORDONED)
    found = told(cluster, cluster.submit(gpus=2, members=2))
    assert "even when empty, the open nodes hold only 1" in found.why
    assert found.start == ""


def test_a_range_says_both_of_its_ends() -> None:
    cluster = Cluster(SHIPPED["backfill"])
    cluster.join("a", gpus=4)
    cluster.run(gpus=4, estimate_ms=168_000, cpu_milli=0)
    cluster.submit(gpus=4, estimate_ms=23 * HOUR_MS, cpu_milli=0)
    found = told(cluster, cluster.submit(gpus=4, cpu_milli=0))
    assert found.start == "it will probably start in 3m to 23h"


def test_a_retry_and_the_room_for_it_are_one_sentence() -> None:
    cluster = Cluster(SHIPPED["backfill"])
    cluster.join("a", gpus=4)
    job_id = cluster.run(gpus=4, restart="on-failure", retries=3, backoff_ms=60_000)
    cluster.wait(3_000)
    cluster.end(job_id, 1)
    assert told(cluster, job_id).start == "it will probably start when its retry is due, in 1m"
    cluster.run(gpus=4, estimate_ms=2 * HOUR_MS, time_limit_ms=2 * HOUR_MS)
    found = told(cluster, job_id)
    assert found.start == (
        "its retry is due in 1m, but it will probably start in about 2h, when there is room"
    )
    assert "retries in 1m" in found.why


def test_nobody_knows_is_said_once_and_with_what_would_help() -> None:
    cluster = Cluster(SHIPPED["backfill"])
    cluster.join("a", gpus=4)
    cluster.submit(gpus=4, cpu_milli=0)
    cluster.wait(1_000)
    cluster.deliver()
    found = told(cluster, cluster.submit(gpus=4, cpu_milli=0))
    assert found.early_ms is None
    assert found.start.startswith("its start cannot be predicted: jobs ahead have no --time-limit")


def test_a_reservation_for_what_is_late_is_not_made_again_and_again() -> None:
    cluster = Cluster(SHIPPED["backfill"])
    cluster.join("a", gpus=4)
    cluster.run(gpus=4, time_limit_ms=0, estimate_ms=5_000, cpu_milli=0)
    waits = cluster.submit(gpus=4, estimate_ms=5_000, cpu_milli=0)
    reserved = 0
    for _ in range(30):
        cluster.wait(10_000)
        cluster.hear("a")
        reserved += sum(
            isinstance(e, JobReserved) and e.job == waits for e in cluster.step().events
        )
    assert reserved <= 1
    told(cluster, waits)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(more, marks=pytest.mark.soak) for more in (10, 20, 30))]
)
def test_no_answer_denies_itself_in_any_state_of_the_storm(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from storm import controller

    looks = 0

    def look(state: State, policy: Policy, _: object, now_ms: int) -> None:
        nonlocal looks
        for job_id in state.jobs:
            looks += 1
            assert_agrees(state, job_id, policy, now_ms)

    monkeypatch.setattr(controller, "verify_changes", look)
    for seed in range(first, first + 10):
        Run(seed, msgspec.structs.replace(Size(), services_part=0)).finish()
    assert looks > 1000
