"""One pool: at a peak a service takes GPUs from elastic training, and gives them back at night."""

from __future__ import annotations

from typing import Any

from shoal.core.answers.why import waiting_reason
from shoal.core.state.events.queue import JobClaimed
from shoal.core.state.events.runs import JobStopping
from shoal.model.job import StopCause
from shoal.model.policy import Policy
from shoal.model.reason import render
from tests.core.serving import LOOK_MS, Serving

POLICY = Policy(run_ms_min=2_000, move_cost_ms=10**9, silent_after_ms=10**9, grace_ms=10**9)
SERVICE: dict[str, Any] = {
    "scale": {"least": 1, "most": 3, "target": 2, "down_after_ms": 5_000},
    "replica": {"gpus": 1, "cpu_milli": 0, "priority": 100},
}
TRAINS: dict[str, Any] = {"gpus": 1, "cpu_milli": 0, "preemptible": True, "checkpoint_ms": 1_000}


def test_elastic_training_shrinks_before_anybody_is_evicted_and_grows_back_at_night() -> None:
    cluster = Serving(nodes=0, policy=POLICY)
    cluster.join("a", gpus=6)
    cluster.served(**SERVICE)
    small = cluster.run(**TRAINS)
    wide = cluster.run(**TRAINS, members=1, members_max=4, name="wide")
    cluster.tick(10)
    assert len(cluster.job(wide).members) == 4
    first = cluster.ready()

    cluster.work = dict.fromkeys(first, 6)  # the peak
    cluster.tick(8)
    assert len(cluster.ready()) == 3
    assert set(first) <= set(cluster.ready())
    stops = [event for event in cluster.log if isinstance(event, JobStopping)]
    assert {(stop.job, stop.cause) for stop in stops} == {(wide, StopCause.RESIZE)}
    assert len(stops) == 1  # for both replicas
    assert "shrinks to 3 members to make room for" in stops[0].why
    assert len(cluster.job(wide).members) == 2
    assert "chat-v1" in stops[0].why
    assert "priority 100" in stops[0].why
    claim = next(e for e in cluster.log if isinstance(e, JobClaimed) and e.job != wide)
    assert "starts when" in claim.why
    assert "wide" in claim.why
    assert (cluster.job(small).attempt, cluster.job(wide).failures) == (1, 0)

    cluster.work = {}  # the night
    cluster.tick(40)
    assert len(cluster.ready()) == 1
    assert len(cluster.job(wide).members) == 4
    grows = [event.why for event in cluster.log if isinstance(event, JobStopping)]
    assert any(f"grows from {least} to 4 members" in why for why in grows for least in (1, 2, 3))
    assert cluster.job(small).attempt == 1


def test_a_replica_that_waits_for_training_to_stop_says_so() -> None:
    cluster = Serving(nodes=0, policy=POLICY)
    cluster.join("a", gpus=2)
    cluster.served(**SERVICE)
    trains = cluster.run(**TRAINS, name="night-run")
    cluster.tick(6)
    cluster.work = dict.fromkeys(cluster.ready(), 4)
    cluster.wait(LOOK_MS)
    cluster.step(services=(cluster.load("chat"),))  # nobody has obeyed yet
    assert cluster.job(trains).stop_cause is StopCause.PREEMPT
    assert "is preempted to make room for" in cluster.job(trains).why
    (waiting,) = [job for job in cluster.replicas() if not job.members]
    why = render(waiting_reason(cluster.state, waiting, cluster.policy, cluster.now_ms))
    assert why is not None
    assert "night-run" in str(why)
