"""Workflows and schedules of a real cluster, whose controller is killed, or gone for a while."""

from __future__ import annotations

import time
from pathlib import Path

from harness.waiting import until

from shoal.control.lifecycle import take_down
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.schedules import ScheduleMissed, ScheduleRan, ScheduleSkipped
from shoal.cron import due_after, parse, zone_of
from shoal.model.schedule import Overlap, ScheduleSpec
from shoal.model.workflow import WorkflowJob
from tests.live.cluster import Live, live_cluster

EVERY_SECOND = "* * * * * *"


def job(live: Live, name: str, script: str, *after: str) -> WorkflowJob:
    return WorkflowJob(name, live.spec("sh", "-c", script, cpu_milli=100), after)


def test_a_workflow_branches_and_a_schedule_counts_while_controllers_die(tmp_path: Path) -> None:
    diary, gate = tmp_path / "diary", tmp_path / "gate"
    noted = f"echo $SHOAL_JOB_NAME >> {diary}"
    with live_cluster(nodes=1, gpus=0) as live:
        key = "once"
        jobs = [
            job(live, "prepare", f"{noted}; while [ ! -e {gate} ]; do sleep 0.05; done"),
            job(live, "big", noted, "prepare"),
            job(live, "small", f"{noted}; exit 3", "prepare"),
            job(live, "report", noted, "big:any", "small:any"),
            job(live, "publish", noted, "big", "small"),
        ]
        flow = live.client.submit_workflow(jobs, key)
        live.wait(flow.id, "running")
        live.kill_controller()
        assert live.client.submit_workflow(jobs, key).id == flow.id
        _set_schedule(live)
        live.kill_controller()
        gate.touch()
        for node in flow.nodes:
            live.wait(node.id)
        view = live.client.workflow(flow.id)
        states = {node.name: node.state for node in view.nodes}
        assert states == {
            "prepare": "succeeded",
            "big": "succeeded",
            "small": "failed",
            "report": "succeeded",
            "publish": "cancelled",
        }
        publish = next(node for node in view.nodes if node.name == "publish")
        assert publish.why.endswith("(small) to succeed, but j3 failed: it exited 3")
        ran = diary.read_text().split()
        assert sorted(ran) == ["big", "prepare", "report", "small"]
        assert ran.index("report") > max(ran.index("big"), ran.index("small"))
        _while_down(live)


def _set_schedule(live: Live) -> None:
    work = WorkflowJob("tick", live.spec("sh", "-c", "echo $SHOAL_SCHEDULED_AT", cpu_milli=100))
    spec = ScheduleSpec(name="tick", cron=EVERY_SECOND, overlap=Overlap.ALLOW, jobs=(work,))
    live.client.set_schedule(spec)


def _while_down(live: Live) -> None:
    """Some due times pass while no controller is there."""
    until(lambda: live.client.schedule("tick").runs >= 2)
    take_down(live.home, lambda _: None)
    time.sleep(4.1)  # the due times that are to be missed
    live.restart()
    seen = live.client.schedule("tick").runs
    until(lambda: live.client.schedule("tick").runs > seen)
    live.client.remove_schedule("tick")
    events = [one.event for one in live.client.events(limit=10_000).events]
    told = [one for one in events if isinstance(one, ScheduleMissed)]
    assert any(one.count >= 2 for one in told), told
    assert "while the controller was down" in told[-1].why
    # Every second from the first on is in exactly one event.
    due: list[int] = []
    for one in events:
        if isinstance(one, ScheduleMissed):
            due += range(one.first_ms, one.last_ms + 1000, 1000)
            assert (one.last_ms - one.first_ms) // 1000 + 1 == one.count
        elif isinstance(one, ScheduleRan | ScheduleSkipped):
            due.append(one.due_ms)
    assert due == list(range(due[0], due[-1] + 1000, 1000))
    ran = [one for one in events if isinstance(one, ScheduleRan)]
    jobs = {
        one.job: one.spec.scheduled_ms
        for one in events
        if isinstance(one, JobSubmitted) and one.spec.schedule
    }
    assert jobs == {one.job: one.due_ms for one in ran}
    first = live.client.job(ran[0].job, wait_for="finished", wait_s=30)
    assert first.state == "succeeded"
    assert live.output(first.id).endswith("Z\n")
    assert due_after(parse(EVERY_SECOND), zone_of(""), due[0]) == due[0] + 1000
