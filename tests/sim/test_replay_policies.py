"""Any policy can be replayed: health rules, budgets, idle GPUs and services act as they do live."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from shoal.core.state.events.budgets import BudgetFreed, BudgetHeld
from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.nodes import NodeJudged
from shoal.core.state.events.runs import JobCheckpointed, JobIdled, JobStopping
from shoal.core.state.events.services import ReplicaReady, ServiceScaled
from shoal.model.health import Standing
from shoal.model.job import Job, JobSpec, StopCause
from shoal.model.ledger import Price, PriceList
from shoal.model.policy import Policy, Tenant
from shoal.model.resources import Slice
from shoal.model.service import Scale, ServiceSpec
from shoal.sim.replay.clusters import Conditions, Failures, Slowness, alike, gangs_for
from shoal.sim.replay.metrics import Levels
from shoal.sim.replay.readers.history import read_history
from shoal.sim.replay.replay import Replay
from shoal.sim.replay.simulated import Attempt, SimCluster, SimJob
from shoal.sim.replay.traces import Arrival, Gangs, RecordedService, Trace

HOUR_MS = 3_600_000
QUICK = Conditions(start_up_ms=1_000, stop_ms=1_000, restart_cost_ms=5_000)


class Logged(Replay):
    """Keeps the log that a cluster would have."""

    log: list[Recorded]

    def commit(self, events: Sequence[Event], finished: Sequence[Job]) -> int:
        self.__dict__.setdefault("log", [])
        self.log += [Recorded(len(self.log) + n, event) for n, event in enumerate(events, 1)]
        return super().commit(events, finished)

    def events(self, kind: type[Any]) -> list[Any]:
        return [one.event for one in self.log if isinstance(one.event, kind)]

    def hours(self) -> dict[str, float]:
        assert self.outcome.ledger is not None
        return {one.account: one.gpu_us / 3.6e9 for one in self.outcome.ledger.accounts}


def played(
    trace: Trace,
    policy: Policy,
    conditions: Conditions = QUICK,
    *,
    nodes: int = 4,
    prices: PriceList | None = None,
) -> Logged:
    one = Logged(trace, alike(nodes, gpus=8), policy, conditions, "", 0, prices)
    one.run(check_every=7)
    return one


def jobs(*wanted: tuple[int, float, int], **fields: Any) -> Trace:
    """Jobs as (submitted in s, hours of work, GPUs)."""
    gangs = Gangs(8)
    return Trace(
        "made up",
        [
            Arrival(at_s * 1000, int(hours * HOUR_MS), gangs.spec(gpus, **fields), row, "t")
            for row, (at_s, hours, gpus) in enumerate(wanted, 2)
        ],
    )


def test_a_slow_node_is_found_by_its_members_beats_and_is_repaired() -> None:
    conditions = msgspec.structs.replace(
        QUICK, slow_nodes=Slowness(0.2, 0.4), failures=Failures(repair_ms=HOUR_MS)
    )
    gangs = jobs(*[(n * 60, 3.0, 16) for n in range(10)])
    one = played(gangs, Policy(), conditions, nodes=5)
    standings = [event.record.standing for event in one.events(NodeJudged)]
    assert Standing.QUARANTINED in standings
    assert standings[-1] is Standing.OK
    hours = one.hours()
    assert hours["straggler"] > 0 and hours["quarantined"] > 0


def test_budgets_hold_jobs_by_what_the_replays_own_ledger_says() -> None:
    tenants = (Tenant(name="red", budget_gpu_hours=20), Tenant(name="blue"))
    wanted = [(n * 1800, 1.0, 8) for n in range(4)]
    one = played(jobs(*wanted, tenant="red"), Policy(tenants=tenants), nodes=1)
    held, freed = one.events(BudgetHeld), one.events(BudgetFreed)
    assert len(held) == len(freed) == 1  # 4 jobs of 8 GPU-hours, about 24 in a month
    assert one.outcome.records.finished_ms[-1] > 29 * 24 * HOUR_MS
    free = played(jobs(*wanted, tenant="blue"), Policy(tenants=tenants), nodes=1)
    assert not free.events(BudgetHeld)


@pytest.mark.soak
def test_a_budget_in_money_counts_by_the_price_list() -> None:
    tenants = (Tenant(name="red", budget_money=100),)
    prices = PriceList(currency="EUR", gpus={"*": Price(per_hour=5)})
    wanted = jobs((0, 1.0, 8), (7200, 1.0, 8), (14_400, 1.0, 8), (21_600, 1.0, 8), tenant="red")
    one = played(wanted, Policy(tenants=tenants), nodes=1, prices=prices)
    assert one.events(BudgetHeld)[0].at_ms > 2 * HOUR_MS
    assert len(one.outcome.records) == 4
    assert not played(wanted, Policy(), nodes=1, prices=prices).events(BudgetHeld)


def test_gpus_that_a_history_saw_idle_are_taken_back_where_the_policy_says_so() -> None:
    spec = Gangs(8).spec(8)
    idle = Arrival(0, 4 * HOUR_MS, spec, 2, waited_ms=0, idle_ms=((HOUR_MS, 3 * HOUR_MS),))
    trace = Trace("idle", [idle])
    kept = played(trace, Policy(), nodes=1)
    assert kept.hours()["idle"] == 16
    policy = Policy(idle_warn_ms=600_000, idle_reclaim_ms=1_800_000)
    taken = played(trace, policy, nodes=1)
    assert len(taken.events(JobIdled)) == 1
    assert [event.cause for event in taken.events(JobStopping)] == [StopCause.IDLE]
    assert taken.hours()["idle"] < 5


def service(least: int, most: int) -> ServiceSpec:
    replica = JobSpec(command=("serve",), gpus=1, cpu_milli=0, priority=100)
    return ServiceSpec(name="llm", replica=replica, scale=Scale(least=least, most=most, target=4))


def test_the_services_of_a_log_are_replayed_as_services_with_their_load() -> None:
    llm = RecordedService(
        name="llm",
        changes=((0, service(1, 6)), (5 * HOUR_MS, None)),
        work=((0, 2), (HOUR_MS, 20), (3 * HOUR_MS, 2)),
        ready_ms=20_000,
        until_ms=6 * HOUR_MS,
    )
    batch = jobs(*[(n * 600, 1.0, 8) for n in range(6)], preemptible=True).arrivals
    one = played(Trace("both", batch, services=(llm,)), Policy(), nodes=2)
    assert max(event.wanted for event in one.events(ServiceScaled)) in (5, 6)
    assert len(one.events(ReplicaReady)) >= 5
    assert one.hours()["serving"] > 10
    assert len(one.outcome.records) == 6 and not one.state.services

    log = one.log
    again = read_history(lambda after, limit: log[after : after + limit], "log").trace(
        gangs_for(alike(2, gpus=8))
    )
    assert len(again.arrivals) == 6
    (found,) = again.services
    assert [spec is None for _, spec in found.changes] == [False, True]
    assert 20_000 <= found.ready_ms <= 50_000  # seen at the next look
    was, now = one.hours(), played(again, Policy(), nodes=2).hours()
    # Work that was lost and done again is part of a log, and counts as work in its replay.
    for account, part in (("serving", 0.1), ("useful", 0.2)):
        assert abs(now[account] - was[account]) < part * was[account], account


def test_a_job_whose_members_reported_checkpoints_reports_them_again() -> None:
    spec = JobSpec(command=("train",), gpus=8, cpu_milli=0)
    job = Arrival(0, HOUR_MS, spec, 2, waited_ms=0, beats=True, checkpoint_ms=600_000)
    one = played(Trace("beats", [job]), Policy(), nodes=1)
    assert [event.step for event in one.events(JobCheckpointed)] == [600, 1200, 1800, 2400, 3000]
    log = one.log
    history = read_history(lambda after, limit: log[after : after + limit], "log")
    (found,) = history.trace(gangs_for(alike(1, gpus=8))).arrivals
    assert (found.beats, found.checkpoint_ms) == (True, 600_000)


def test_beats_at_checkpoints_go_on_where_rounding_lies_before_the_save() -> None:
    """At speed 0.7, 17 intervals of 7 s end at a moment in which 118.999 s of work are done. The
    next beat was planned for that same moment, forever."""
    cluster = SimCluster(alike(1, gpus=1), QUICK, Levels(alike(1, gpus=1)), 0)
    job = SimJob(jobs((0, 1.0, 1)).arrivals[0], 1000)
    attempt = Attempt("j1", 1, job, (Slice("n1", (0,)),), 0)
    attempt.begin_ms, attempt.speed, attempt.every_ms = 0, 0.7, 7_000
    attempt.needed_ms, attempt.beats = HOUR_MS, 99
    for _ in range(600):
        cluster._plan_beat(attempt)
        due_ms = cluster._heap.pop()[0]
        assert due_ms > cluster.now_ms
        cluster.now_ms = due_ms
