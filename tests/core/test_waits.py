"""A long queue in a few lines: how many wait, and for what."""

from __future__ import annotations

import msgspec

from shoal.core.answers.waits import LINES_MAX, waits_of
from shoal.core.policies import SHIPPED
from shoal.model.budget import BudgetPeriod, Spending
from shoal.model.policy import Policy, Tenant
from shoal.model.reason import render
from tests.core.build import Cluster


def told(cluster: Cluster) -> list[str]:
    return [render(line) for line in waits_of(cluster.state, cluster.policy, cluster.now_ms)]


def test_those_behind_a_reservation_are_one_line() -> None:
    cluster = Cluster(SHIPPED["backfill"])
    cluster.join("a", gpus=8)
    cluster.run(gpus=6, estimate_ms=3_600_000, cpu_milli=0)
    big = cluster.submit(gpus=8, estimate_ms=3_600_000, cpu_milli=0)
    for _ in range(30):
        cluster.submit(gpus=1, estimate_ms=9_000_000, cpu_milli=0)
    assert told(cluster) == [
        f"30 jobs wait for {big}, which is ahead of them",
        "1 job waits for room: no node has 8 GPUs free",
    ]


def test_budgets_and_retries_are_counted_too() -> None:
    cluster = Cluster(Policy(tenants=(Tenant(name="red", budget_gpu_hours=1),)))
    cluster.join("a", gpus=2)
    spent = Spending(tenant="red", period=BudgetPeriod.MONTH, gpu_us=3_600_000_000)
    cluster.step(spendings=(spent,))
    for _ in range(3):
        cluster.submit(gpus=1, tenant="red")
    fails = cluster.run(restart="on-failure", retries=2, backoff_ms=4_000)
    cluster.end(fails, code=1)
    assert told(cluster) == ["3 jobs wait for the budget of red", "1 job waits before a retry"]


def test_nobody_waits_nothing_is_said_and_many_reasons_are_bounded() -> None:
    cluster = Cluster(msgspec.structs.replace(SHIPPED["backfill"], reservations=0))
    assert told(cluster) == []
    cluster.join("a", gpus=8)
    cluster.run(gpus=8, cpu_milli=0)
    for gpus in range(1, 9):
        cluster.submit(gpus=gpus, cpu_milli=0)
    assert len(told(cluster)) <= LINES_MAX + 1


def test_a_tenant_is_told_of_its_own_jobs_alone() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=2)
    cluster.run(gpus=2)
    for tenant in ("red", "red", "blue"):
        cluster.submit(gpus=1, tenant=tenant)
    fails = cluster.run(restart="on-failure", retries=2, backoff_ms=4_000, tenant="red")
    cluster.end(fails, code=1)

    def own(tenant: str) -> list[str]:
        return [
            render(line) for line in waits_of(cluster.state, cluster.policy, cluster.now_ms, tenant)
        ]

    room = "for room: no node has 1 GPU, 1 CPU free"
    assert own("red") == [f"2 jobs wait {room}", "1 job waits before a retry"]
    assert own("blue") == [f"1 job waits {room}"]
    assert own("green") == []
