"""A node that really is slower, on a live cluster: found by two gangs, closed, and left by both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import WAIT_S, until

from shoal.core.state.events.runs import JobStopping
from shoal.model.health import Standing
from shoal.model.job import StopCause
from tests.live.cluster import Live, live_cluster

STEPPER = Path(__file__).with_name("stepper.py")
STEPS = 1_000  # minutes, at the slow pace: the gangs are still at it when the node is found


@pytest.fixture
def live() -> Iterator[Live]:
    """Four nodes, each with room for a member of either gang."""
    with live_cluster(nodes=4, gpus=2) as live:
        policy = live.client.policy()
        live.client.set_policy(msgspec.structs.replace(policy, move_cost_ms=1_000))
        yield live


def gang(live: Live, pace: Path) -> str:
    spec = live.spec(
        *(sys.executable, str(STEPPER), str(STEPS), str(pace)),
        members=3,
        members_per_node=1,
        gpus=1,
        cpu_milli=0,
        checkpoint_ms=1_000,
    )
    job_id = live.client.submit(spec).id
    assert live.wait(job_id, "running") == "running"
    return job_id


def nodes_of(live: Live, job_id: str) -> list[str]:
    return [member.node for member in live.client.job(job_id).gang]


def node_that_is(live: Live, standing: Standing) -> list[str]:
    return [node.id for node in live.client.nodes() if node.standing == standing]


@pytest.mark.outside("a slow node is found by the time that real steps take")
def test_two_gangs_find_a_slow_node_leave_it_for_a_spare_one_and_make_all_their_steps(
    live: Live, tmp_path: Path
) -> None:
    """One gang's word costs a check, which these nodes pass, for the machine below them is well. A
    second gang's word closes the node."""
    pace = tmp_path / "pace"
    jobs = [gang(live, pace) for _ in range(2)]
    before = {job_id: nodes_of(live, job_id) for job_id in jobs}
    slow = min(set(before[jobs[0]]) & set(before[jobs[1]]))
    pace.write_text(slow)

    until(lambda: node_that_is(live, Standing.QUARANTINED) == [slow])
    for job_id in jobs:
        until(lambda: live.client.job(job_id).attempt == 2)  # noqa: B023
        assert live.wait(job_id, "running", WAIT_S) == "running"
    after = {job_id: nodes_of(live, job_id) for job_id in jobs}
    pace.write_text("")  # at full speed to the end

    for job_id in jobs:
        assert live.wait(job_id, timeout_s=WAIT_S) == "succeeded"
        (spare,) = set(after[job_id]) - set(before[job_id])
        moved = [spare if node == slow else node for node in before[job_id]]
        assert after[job_id] == moved, "who was not on the slow node stays"
        began, done = live.output(job_id).splitlines()
        assert int(began.split()[1]) > 0, "what was done before the move is kept"
        assert done == f"done {STEPS}"
        (stop,) = [
            record.event
            for record in live.client.why(job_id).events
            if isinstance(record.event, JobStopping)
        ]
        assert stop.cause is StopCause.MOVE
        assert f"leaves {slow}, which is in quarantine, for {spare}" in stop.why
        assert "worth it" in stop.why

    (node,) = [node for node in live.client.nodes() if node.id == slow]
    standings = [entry.standing for entry in node.history]
    assert (standings[0], standings[-1]) == (Standing.SUSPECT, Standing.QUARANTINED)
    assert "suspected a second time" in node.why
