"""Schedules: each due time has its run, or an event that says why it had none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.phases.reconcile import GangView
from shoal.core.state.events.schedules import (
    ScheduleMissed,
    SchedulePaused,
    ScheduleRan,
    ScheduleSkipped,
)
from shoal.cron import next_due
from shoal.model.identity import Role, User
from shoal.model.reason import render
from shoal.model.report import (
    Accepted,
    AddTenant,
    PauseSchedule,
    Refused,
    RemoveSchedule,
    RemoveTenant,
    RemoveUser,
    RunSchedule,
    SetSchedule,
    SetUser,
)
from shoal.model.schedule import ScheduleSpec
from shoal.model.workflow import WorkflowJob
from tests.core.build import Cluster, job_spec

HOUR_MS = 3_600_000
START_MS = 1_794_884_400_000  # 2026-11-17 03:00 UTC


def cluster_at(now_ms: int = START_MS) -> Cluster:
    cluster = Cluster()
    cluster.now_ms = now_ms
    cluster.join("n1")
    return cluster


def spec_of(cron: str = "0 * * * *", tenant: str = "default", **fields: Any) -> ScheduleSpec:
    job = WorkflowJob("hourly", job_spec(tenant=tenant))
    fields = {"jobs": (job,), **fields}
    return msgspec.convert({"name": "hourly", "cron": cron, **fields}, ScheduleSpec)


def add(cluster: Cluster, spec: ScheduleSpec, owner: str = "") -> None:
    scope = "*" if not owner else spec.tenant
    answer = cluster.ask(SetSchedule(spec, next_due(spec, cluster.now_ms), owner, scope=scope))
    assert isinstance(answer, Accepted), answer


def of_kind(cluster: Cluster, kind: type) -> list[Any]:
    return [event for event in cluster.last.events if type(event) is kind]


def test_a_run_is_a_job_that_knows_what_it_is_a_run_of() -> None:
    cluster = cluster_at()
    add(cluster, spec_of())
    assert cluster.last.wake_ms is not None and cluster.last.wake_ms <= START_MS + HOUR_MS
    cluster.wait(HOUR_MS)
    cluster.hear("n1")
    (ran,) = of_kind(cluster, ScheduleRan)
    job = cluster.state.jobs[ran.job]
    assert (job.spec.schedule, job.spec.scheduled_ms) == ("hourly", START_MS + HOUR_MS)
    cluster.hear("n1")
    assert not of_kind(cluster, ScheduleRan)
    env = GangView(cluster.state, job).environment(0)
    assert (env["SHOAL_SCHEDULE"], env["SHOAL_SCHEDULED_AT"]) == ("hourly", "2026-11-17T04:00:00Z")


@pytest.mark.parametrize(("missed", "runs"), [("run", 1), ("skip", 0)])
def test_missed_runs_are_reported_and_one_is_made_up_for(missed: str, runs: int) -> None:
    cluster = cluster_at()
    add(cluster, spec_of(missed=missed))
    cluster.wait(3 * HOUR_MS + HOUR_MS // 2)
    cluster.hear("n1")
    (told,) = of_kind(cluster, ScheduleMissed)
    assert (told.count, told.first_ms, told.last_ms) == (
        3,
        START_MS + HOUR_MS,
        START_MS + 3 * HOUR_MS,
    )
    assert told.why.startswith(
        "it was due 3 times, from 2026-11-17 04:00 UTC to 2026-11-17 06:00 UTC"
    )
    assert len(of_kind(cluster, ScheduleRan)) == runs
    assert cluster.state.schedules["default/hourly"].next_ms == START_MS + 4 * HOUR_MS


def test_a_run_that_is_a_minute_late_is_on_time_whatever_the_rule() -> None:
    cluster = cluster_at()
    add(cluster, spec_of(missed="skip"))
    cluster.wait(2 * HOUR_MS + 59_000)
    cluster.hear("n1")
    (told,), (ran,) = of_kind(cluster, ScheduleMissed), of_kind(cluster, ScheduleRan)
    assert (told.count, ran.due_ms) == (1, START_MS + 2 * HOUR_MS)


@pytest.mark.parametrize(("overlap", "runs"), [("skip", 0), ("allow", 1)])
def test_a_run_may_be_left_out_while_the_last_one_goes_on(overlap: str, runs: int) -> None:
    cluster = cluster_at()
    add(cluster, spec_of(overlap=overlap))
    cluster.wait(HOUR_MS)
    cluster.step()
    cluster.wait(HOUR_MS)
    cluster.step()
    assert len(of_kind(cluster, ScheduleRan)) == runs
    skipped = of_kind(cluster, ScheduleSkipped)
    assert [render(one.why) for one in skipped] == ["the run before it, j1, has not ended"] * (
        1 - runs
    )


def test_a_workflow_runs_as_a_whole() -> None:
    cluster = cluster_at()
    jobs = (WorkflowJob("a", job_spec()), WorkflowJob("b", job_spec(), ("a",)))
    add(cluster, spec_of(jobs=jobs, workflow=True))
    cluster.wait(HOUR_MS)
    cluster.step()
    assert cluster.state.jobs["j2"].awaits == ("j1",)
    assert {job.spec.workflow for job in cluster.state.jobs.values()} == {"j1"}
    cluster.wait(HOUR_MS)
    cluster.step()
    assert of_kind(cluster, ScheduleSkipped)


def test_a_run_that_would_be_refused_is_left_out_with_the_reason() -> None:
    cluster = Cluster()
    cluster.now_ms = START_MS
    add(cluster, spec_of(jobs=(WorkflowJob("big", job_spec(gpus=64)),)))  # no node is known yet
    cluster.join("n1")
    cluster.wait(HOUR_MS)
    cluster.step()
    (skipped,) = of_kind(cluster, ScheduleSkipped)
    assert "asks for 64 GPUs" in skipped.why


def test_a_schedule_is_paused_resumed_run_and_removed() -> None:
    cluster, key = cluster_at(), "default/hourly"
    add(cluster, spec_of())
    assert cluster.ask(PauseSchedule(key, who="anna")) == Accepted("hourly")
    assert cluster.state.schedules[key].paused == "paused by anna"
    cluster.wait(5 * HOUR_MS)
    cluster.step()
    assert not cluster.state.jobs
    assert cluster.ask(RunSchedule(key, "k")) == Accepted("j1")
    assert cluster.ask(RunSchedule(key, "k")) == Accepted("j1", "this run was already accepted")
    next_ms = next_due(spec_of(), cluster.now_ms)
    assert cluster.ask(PauseSchedule(key, next_ms)) == Accepted("hourly")
    assert cluster.state.schedules[key].next_ms == START_MS + 6 * HOUR_MS
    assert cluster.ask(RemoveSchedule(key)) == Accepted("hourly")
    answer = cluster.ask(RemoveSchedule(key))
    assert isinstance(answer, Refused) and answer.missing


def test_a_tenant_cannot_touch_anothers_schedule() -> None:
    cluster = cluster_at()
    add(cluster, spec_of())
    for request in (PauseSchedule, RunSchedule, RemoveSchedule):
        answer = cluster.ask(request("default/hourly", scope="red"))
        assert isinstance(answer, Refused) and answer.missing


def test_a_schedule_stops_when_its_user_is_gone_and_goes_with_its_tenant() -> None:
    cluster, key = cluster_at(), "lab/hourly"
    cluster.ask(AddTenant("lab"))
    cluster.ask(SetUser(User(name="anna", roles={"lab": Role.MEMBER}), add=True))
    add(cluster, spec_of(tenant="lab"), owner="anna")
    cluster.ask(RemoveUser("anna"))
    (paused,) = of_kind(cluster, SchedulePaused)
    assert paused.why == "its user anna was removed"
    cluster.ask(SetUser(User(name="anna", roles={"lab": Role.MEMBER}), add=True))
    cluster.wait(HOUR_MS)
    cluster.step()
    assert not of_kind(cluster, ScheduleRan), "this anna is somebody else"
    assert isinstance(cluster.ask(RemoveTenant("lab")), Accepted)
    assert key not in cluster.state.schedules


@pytest.mark.parametrize(
    ("fields", "field"), [({"after": ("j1",)}, "after"), ({"begin_ms": 9}, "begin")]
)
def test_a_schedule_does_not_wait_for_other_things(fields: dict[str, Any], field: str) -> None:
    cluster = cluster_at()
    spec = spec_of(jobs=(WorkflowJob("a", job_spec(**fields)),))
    answer = cluster.ask(SetSchedule(spec, START_MS + HOUR_MS))
    assert isinstance(answer, Refused) and answer.field == field


def test_a_year_without_a_controller_is_counted_in_a_moment() -> None:
    cluster = cluster_at()
    add(cluster, spec_of("* * * * * *"))
    cluster.wait(366 * 24 * HOUR_MS)
    cluster.hear("n1")
    (told,) = of_kind(cluster, ScheduleMissed)
    assert "at least 999 times" in told.why
    assert of_kind(cluster, ScheduleRan)
    assert cluster.state.schedules["default/hourly"].next_ms == cluster.now_ms + 1000


def test_a_schedule_whose_times_change_while_nobody_runs_it_is_counted_by_its_new_times() -> None:
    """The first time is due by both. What else was due is not what the old times say."""
    cluster = cluster_at()
    add(cluster, spec_of("0 * * * *"))
    changed = spec_of("0 */2 * * *")
    first_ms = next_due(changed, cluster.now_ms)
    assert first_ms == next_due(spec_of("0 * * * *"), cluster.now_ms)
    cluster.wait(3 * HOUR_MS + 30_000)
    assert isinstance(cluster.ask(SetSchedule(changed, first_ms)), Accepted)
    assert cluster.last.wake_ms == cluster.now_ms, "what is due comes with the next step"
    cluster.step()
    (missed,) = of_kind(cluster, ScheduleMissed)
    (ran,) = of_kind(cluster, ScheduleRan)
    assert (missed.count, missed.last_ms) == (1, first_ms)
    assert ran.due_ms == first_ms + 2 * HOUR_MS
