"""A service without requests: its last replica sleeps, belongs to it, and wakes with the next."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.core.features.service.sleep import TOLD_MS, stays_awake
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.services import ReplicaReady
from shoal.core.state.events.sleep import JobAwake, JobDozing
from shoal.core.state.load import restore
from shoal.forms.failure import BadField
from shoal.forms.job import to_service
from shoal.model.commands import Sleep, Wake
from shoal.model.job import Job, Phase, SleepCause
from shoal.model.node import NodeIntent
from shoal.model.policy import Policy, Sleeping
from shoal.model.reason import render
from shoal.model.report import SetIntent, SleepJob
from tests.core.serving import LOOK_MS, Serving

NAPS: dict[str, Any] = {"sleep_after_ms": 10_000, "drain_ms": 20_000}
ONE_GPU: dict[str, Any] = {"replica": {"gpus": 1, "priority": 100}}
CALM: dict[str, Any] = {"run_ms_min": 0, "silent_after_ms": 10**9, "grace_ms": 10**9}


def asleep(cluster: Serving, **fields: Any) -> Job:
    """Its only replica sleeps."""
    cluster.served(**{**NAPS, **fields})
    cluster.tick(40)
    (job,) = cluster.replicas()
    assert job.phase is Phase.ASLEEP
    return job


def test_the_last_replica_sleeps_and_the_next_request_wakes_it() -> None:
    cluster = Serving()
    job = asleep(cluster)
    assert (job.sleep_cause, job.wants) == (SleepCause.IDLE, False)
    assert job.why.startswith("no request for 10")
    assert cluster.ready() == []
    cluster.tick(200)
    assert cluster.replicas() == [job]
    assert job.phase is Phase.ASLEEP, "it stays the service's replica, and is not started again"
    assert cluster.service().failures == 0
    cluster.held = 20
    cluster.tick()
    assert [type(order) for order in cluster.orders][-1] is Wake
    cluster.tick(2)
    assert cluster.ready() == [job.id]
    assert cluster.job(job.id).attempt == 1
    ready = [event for event in cluster.log if isinstance(event, ReplicaReady)]
    assert "after it woke" in ready[-1].why
    cluster.held = 0
    cluster.work = {job.id: 20}
    cluster.tick(1_300)  # longer than a replica may take to get ready
    assert cluster.ready() == [job.id], "a stream is use, however long it takes"
    cluster.work = {}
    cluster.tick(40)
    assert cluster.job(job.id).phase is Phase.ASLEEP
    assert len([event for event in cluster.log if isinstance(event, JobSubmitted)]) == 1


def test_a_replica_is_drained_before_it_is_frozen() -> None:
    cluster = Serving()
    cluster.served(**NAPS, scale={"least": 2, "most": 2})
    busy, other = cluster.ready()
    cluster.work = {busy: 1, other: 1}
    cluster.ask(SleepJob(busy, "ann"))
    cluster.tick(20)
    assert cluster.job(busy).phase is Phase.DOZING
    assert cluster.ready() == [other], "it gets no new requests"
    assert not [order for order in cluster.orders if isinstance(order, Sleep)]
    cluster.work = {other: 1}
    cluster.tick(1)
    assert cluster.job(busy).phase is Phase.ASLEEP
    cluster.ask(SleepJob(other, "ann"))
    cluster.silent = True
    cluster.state = restore(cluster.state.snapshot())  # as after a restart of the controller
    cluster.tick(38)
    assert cluster.job(other).phase is Phase.DOZING
    cluster.tick(3)
    assert cluster.job(other).phase is Phase.ASLEEP, "its time to drain is over"
    cluster.silent = False
    cluster.tick(6)  # what it had in flight waits for it
    assert other in cluster.ready()


def test_a_step_comes_when_it_may_sleep_though_nothing_new_is_seen() -> None:
    cluster = Serving(policy=Policy(**CALM))
    cluster.served(**NAPS)
    (job,) = cluster.replicas()
    slept_ms = cluster.service().ready[job.id] + NAPS["sleep_after_ms"]
    assert cluster.last.wake_ms is not None
    assert cluster.last.wake_ms <= slept_ms
    while cluster.job(job.id).phase is Phase.RUNNING:
        cluster.tick()
    assert cluster.job(job.id).dozed_ms == cluster.now_ms
    assert cluster.last.wake_ms == cluster.now_ms + TOLD_MS


def test_requests_that_come_while_it_is_drained_find_it_awake() -> None:
    cluster = Serving()
    cluster.served(**NAPS)
    (job,) = cluster.replicas()
    while job.phase is Phase.RUNNING:
        cluster.tick()
        job = cluster.job(job.id)
    assert job.phase is Phase.DOZING
    cluster.held = 1
    cluster.tick()
    assert cluster.ready() == [job.id]
    assert not [order for order in cluster.orders if isinstance(order, Sleep)]
    assert isinstance(cluster.log[-1], ReplicaReady)


def test_replicas_beyond_the_last_end_and_more_start_when_it_wakes() -> None:
    cluster = Serving()
    scale = {"least": 0, "most": 4, "target": 2, "idle_ms": 1_000, "down_after_ms": 1_000}
    cluster.served(**NAPS, scale=scale)
    cluster.held = 6
    cluster.tick(6)
    assert len(cluster.ready()) == 3
    cluster.held = 0
    cluster.tick(60)
    (job,) = cluster.replicas()
    assert (job.phase, cluster.service().wanted) == (Phase.ASLEEP, 1)
    cluster.held = 6
    cluster.tick(8)
    assert len(cluster.ready()) == 3
    assert job.id in cluster.ready()


@pytest.mark.parametrize("least", [0, 1])
def test_a_sleeper_that_is_killed_is_replaced_if_a_replica_is_wanted(least: int) -> None:
    cluster = Serving()
    scale = {"least": least, "most": 2, "idle_ms": 5_000, "down_after_ms": 1_000}
    old = asleep(cluster, scale=scale)
    cluster.crash(old.id, 137)
    cluster.tick(8)
    assert len(cluster.replicas()) == least
    cluster.held = 1
    cluster.tick(8)
    (new,) = cluster.ready()
    assert new != old.id
    cluster.held = 0
    cluster.tick(40)
    assert cluster.job(new).phase is Phase.ASLEEP


def test_a_new_version_ends_the_sleeper_when_it_answers() -> None:
    cluster = Serving()
    old = asleep(cluster)
    cluster.broken = {"v2"}
    cluster.serve(**NAPS, version=2)
    cluster.tick(4)
    assert cluster.job(old.id).phase is Phase.ASLEEP, "it could still be woken"
    cluster.held = 1
    cluster.tick(3)
    assert cluster.versions() == [1]
    cluster.held, cluster.broken = 0, set()
    cluster.tick(10)
    assert cluster.versions() == [2]
    assert old.id in cluster.finished


def test_a_new_version_that_works_ends_a_sleeper_at_once() -> None:
    cluster = Serving()
    old = asleep(cluster)
    cluster.served(**NAPS, version=2)
    assert cluster.versions() == [2]
    assert old.id in cluster.finished
    assert cluster.service().failures == 0


def test_a_service_that_sleeps_can_be_stopped() -> None:
    cluster = Serving()
    asleep(cluster)
    cluster.stop()
    cluster.tick(4)
    assert not cluster.state.services
    assert not cluster.state.jobs


def test_a_sleeper_lost_with_its_node_or_on_a_drained_one_comes_up_elsewhere() -> None:
    cluster = Serving(nodes=3)
    job = asleep(cluster)
    first = job.members[0].slice.node
    cluster.lose_node(first)
    cluster.tick(8)
    assert len(cluster.ready()) == 1
    cluster.tick(40)
    (job,) = cluster.replicas()
    assert job.phase is Phase.ASLEEP
    second = job.members[0].slice.node
    cluster.ask(SetIntent(second, NodeIntent.DRAINING))
    cluster.tick(10)
    (job,) = cluster.replicas()
    assert job.members[0].slice.node not in (first, second)
    assert cluster.service().failures == 0


def test_a_service_that_cannot_sleep_stays_awake_and_says_why() -> None:
    cluster = Serving()
    cluster.restless = "the driver is too old"
    cluster.served(**NAPS)
    cluster.tick(60)
    (job_id,) = cluster.ready()
    where = cluster.job(job_id).members[0].slice.node
    why = render(stays_awake(cluster.state, cluster.service()))
    assert why == (
        f"{job_id} stays awake without requests: it could not be put to sleep before: "
        f"member 0 on {where} could not be put to sleep: the driver is too old"
    )
    assert len([event for event in cluster.log if isinstance(event, JobDozing)]) == 1


def test_a_sleeper_waits_for_its_gpu_and_its_requests_wait_for_it() -> None:
    cluster = Serving(nodes=0, policy=Policy(**CALM, sleep=Sleeping.NEVER))
    cluster.join("a", gpus=1, sleep="freeze")
    job = asleep(cluster, **ONE_GPU)
    other = cluster.submit(gpus=1, priority=200)
    cluster._obey()
    assert cluster.job(other).phase is Phase.RUNNING, "the GPU is lent"
    cluster.held = 2
    cluster.tick(10)
    assert (cluster.job(job.id).phase, cluster.job(job.id).wants) == (Phase.ASLEEP, True)
    cluster.end(other)
    cluster.tick(3)
    assert cluster.ready() == [job.id]


def test_a_replica_that_sleeps_for_another_job_serves_again_after_it() -> None:
    cluster = Serving(nodes=0, policy=Policy(**CALM))
    cluster.join("a", gpus=1, sleep="freeze")
    cluster.served(replica={"gpus": 1, "priority": 100, "preemptible": True})
    (job_id,) = cluster.ready()
    cluster.tick(200)
    cluster.work = {job_id: 1}
    high = cluster.submit(gpus=1, priority=200)
    cluster.tick(10)
    assert cluster.job(job_id).phase is Phase.DOZING, "it still answers"
    assert cluster.ready() == []
    cluster.work = {}
    cluster.tick(2)
    assert cluster.job(high).phase is Phase.RUNNING
    assert cluster.replicas() == [cluster.job(job_id)], "no second replica is started"
    cluster.end(high)
    cluster.tick(3)
    assert cluster.ready() == [job_id]
    assert [event for event in cluster.log if isinstance(event, JobAwake)]


def test_a_replica_that_drains_finishes_its_requests_though_it_is_to_sleep() -> None:
    cluster = Serving()
    cluster.served(drain_ms=60_000)
    (old,) = cluster.ready()
    cluster.work = {old: 1}
    cluster.serve(version=2, drain_ms=60_000)
    cluster.tick(6)
    assert old in cluster.service().draining
    cluster.ask(SleepJob(old, "ann"))
    cluster.tick(20)
    assert cluster.job(old).phase is Phase.DOZING
    cluster.work = {}
    cluster.tick(2)
    assert cluster.finished[old].why == "drained"


def test_a_failure_is_not_hidden_by_what_else_there_is_to_say() -> None:
    cluster = Serving()
    cluster.restless = "the driver is too old"
    cluster.served(**NAPS)
    cluster.tick(60)
    assert stays_awake(cluster.state, cluster.service())
    cluster.crashing = {"v2"}
    cluster.serve(**NAPS, version=2)
    cluster.tick(2)
    assert cluster.service().failures
    assert not stays_awake(cluster.state, cluster.service())


def test_the_time_may_be_changed_without_a_restart() -> None:
    cluster = Serving()
    cluster.served()
    (job_id,) = cluster.ready()
    cluster.tick(30_000 // LOOK_MS)
    assert cluster.ready() == [job_id]
    cluster.serve(**NAPS)
    cluster.tick(6)
    assert cluster.job(job_id).phase is Phase.ASLEEP


def test_it_is_a_field_of_a_service() -> None:
    given = {"name": "chat", "command": ["serve"], "sleep_after": "10m"}
    spec = to_service(given)
    assert spec.sleep_after_ms == 600_000
    assert msgspec.json.decode(msgspec.json.encode(spec), type=type(spec)) == spec
    for bad in ("0", "2 weeks", "-1s"):
        with pytest.raises(BadField, match="sleep_after"):
            to_service({**given, "sleep_after": bad})
    with pytest.raises(BadField, match="a replica with whole_nodes cannot sleep"):
        to_service({**given, "whole_nodes": True})
