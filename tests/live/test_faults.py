"""What is promised when parts die, one at a time, on a real cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from harness.waiting import until

from shoal.control.home import ClusterConfig, Home
from shoal.control.lifecycle import LifecycleError, bring_up, take_down
from shoal.core.state.events.nodes import NodeLost
from shoal.core.state.events.runs import JobStopping
from shoal.machine.ends import forget_end, write_end
from shoal.model.job import StopCause
from shoal.model.node import NodeIntent
from tests.live.cluster import Live, live_cluster, virtual_nodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[Live]:
    with live_cluster(nodes=2, gpus=2) as made:
        yield made


@pytest.fixture
def pair(cluster: Live) -> Iterator[Live]:
    """Whatever a test does to it, the next one finds it whole and empty."""
    yield cluster
    for job in cluster.client.jobs():
        cluster.client.cancel(job.id)
        cluster.wait(job.id)
    for node in cluster.client.nodes():
        cluster.client.set_intent(node.id, NodeIntent.OPEN)
    until(lambda: all(node.state == "ready" for node in cluster.client.nodes()))


def test_a_job_does_not_notice_that_its_controller_was_killed(pair: Live) -> None:
    job = pair.run("echo one; while test ! -e go; do sleep 0.05; done; echo two", gpus=1)
    assert pair.wait(job, "running") == "running"
    directory = next((pair.home.path / "nodes").glob(f"*/members/{job}.1.0"))
    before, earlier = set(pair.member_processes()), pair.client.status()
    pair.kill_controller()
    assert pair.client.job(job).state == "running"
    assert before & set(pair.member_processes()), "its process goes on"
    (directory / "go").touch()
    assert pair.wait(job) == "succeeded"
    assert pair.output(job) == "one\ntwo\n"
    assert pair.client.job(job).attempt == 1
    status = pair.client.status()
    assert (status.epoch, status.restarts) == (earlier.epoch + 1, earlier.restarts + 1)


def test_what_ends_while_no_controller_is_there_is_learned_by_the_next(pair: Live) -> None:
    job = pair.run("echo before; sleep 0.5; exit 4")
    assert pair.wait(job, "running") == "running"
    supervisor = int(pair.home.supervisor_lock.read_text())
    os.kill(supervisor, signal.SIGKILL)
    pair.kill_controller()
    until(lambda: not pair.member_processes())
    bring_up(pair.home, None, lambda _: None)
    assert pair.wait(job) == "failed"
    assert (pair.client.job(job).code, pair.output(job)) == (4, "before\n")


def test_a_killed_agent_is_a_lost_node_and_its_jobs_run_elsewhere(pair: Live) -> None:
    script = "echo attempt $SHOAL_ATTEMPT on $SHOAL_NODE; setsid sleep 600 & sleep 600"
    job = pair.run(script, gpus=2)
    assert pair.wait(job, "running") == "running"
    until(lambda: "attempt 1" in pair.output(job))
    node = pair.client.job(job).nodes[0]
    old = set(pair.member_processes())
    pair.kill_agent(node)
    until(lambda: pair.client.job(job).attempt == 2)
    assert pair.wait(job, "running") == "running"
    assert pair.client.job(job).nodes != [node]
    assert not old & set(pair.member_processes()), "processes of the lost node linger"
    lost = [
        recorded.event
        for recorded in pair.client.events(node=node).events
        if isinstance(recorded.event, NodeLost)
    ]
    assert len(lost) == 1
    assert lost[0].dead, "known for certain, not guessed from silence"
    assert f"attempt 1 on {node}" in pair.output(job, attempt=1), "the log outlived the node"
    assert "does not count as a retry" in " ".join(
        getattr(recorded.event, "why", "") for recorded in pair.client.why(job).events
    )
    pair.client.cancel(job)
    assert pair.wait(job) == "cancelled"
    until(
        lambda: all(view.state == "ready" for view in pair.client.nodes()),
        "the node comes back by itself",
    )


def test_a_job_that_must_never_run_again_fails_with_its_node(pair: Live) -> None:
    job = pair.run("sleep 600", gpus=2, restart="never")
    assert pair.wait(job, "running") == "running"
    pair.kill_agent(pair.client.job(job).nodes[0])
    assert pair.wait(job) == "failed"
    assert "restart is never" in pair.client.why(job).why


def test_members_die_even_if_agent_and_keeper_are_killed_together(pair: Live) -> None:
    job = pair.run("setsid sleep 600; true", gpus=2)
    assert pair.wait(job, "running") == "running"
    node = pair.client.job(job).nodes[0]
    old = set(pair.member_processes())
    info = msgspec.json.decode((pair.home.node(node) / "agent.json").read_bytes())
    os.kill(info["keeper"], signal.SIGSTOP)
    os.kill(info["pid"], signal.SIGKILL)
    os.kill(info["keeper"], signal.SIGKILL)
    until(lambda: pair.client.job(job).attempt == 2)
    until(lambda: not old & set(pair.member_processes()))


def test_a_stopped_agent_is_silent_and_its_jobs_are_left_alone(pair: Live) -> None:
    job = pair.run("echo up; while test ! -e go; do sleep 0.05; done", gpus=2)
    assert pair.wait(job, "running") == "running"
    node = pair.client.job(job).nodes[0]
    directory = pair.home.node(node) / "members" / f"{job}.1.0"
    agent = pair.agent_pid(node)
    os.kill(agent, signal.SIGSTOP)
    try:

        def silent() -> bool:
            return any(view.id == node and view.state == "silent" for view in pair.client.nodes())

        until(silent)
        assert pair.client.job(job).state == "running"
        other = pair.run("true", gpus=2)
        assert pair.wait(other) == "succeeded"
        assert pair.client.job(other).nodes != [node]
    finally:
        os.kill(agent, signal.SIGCONT)
    (directory / "go").touch()
    assert pair.wait(job) == "succeeded"
    assert pair.client.job(job).attempt == 1


def test_a_drained_node_empties_and_a_cordoned_one_takes_nothing_new(pair: Live) -> None:
    job = pair.run("sleep 600", gpus=2, stop_grace_ms=500)
    assert pair.wait(job, "running") == "running"
    node = pair.client.job(job).nodes[0]
    pair.client.set_intent(node, NodeIntent.DRAINING)
    until(lambda: pair.client.job(job).attempt == 2)
    assert pair.wait(job, "running") == "running"
    other = pair.client.job(job).nodes[0]
    assert other != node
    waiting = pair.run("true", gpus=1)
    assert "no node has 1 GPU" in pair.client.why(waiting).why
    pair.client.set_intent(node, NodeIntent.CORDONED)
    pair.client.set_intent(other, NodeIntent.CORDONED)
    assert "cordoned" in pair.client.why(waiting).why
    pair.client.set_intent(node, NodeIntent.OPEN)
    assert pair.wait(waiting) == "succeeded"
    assert pair.client.job(job).state == "running"
    pair.client.cancel(job)
    assert pair.wait(job) == "cancelled"


def test_jobs_go_on_after_down_and_up(pair: Live) -> None:
    running = pair.run("test $SHOAL_ATTEMPT = 2 || sleep 600", gpus=2)
    assert pair.wait(running, "running") == "running"
    waiting = pair.run("true", members=2, gpus=2)
    finished = pair.run("echo kept")
    assert pair.wait(finished) == "succeeded"
    assert take_down(pair.home, lambda _: None) == 3
    assert not pair.processes()
    pair.restart()
    assert pair.wait(running) == "succeeded"
    assert pair.wait(waiting) == "succeeded"
    assert pair.output(finished) == "kept\n"


def test_up_is_safe_to_repeat_and_refuses_another_make(pair: Live) -> None:
    config = ClusterConfig(nodes=virtual_nodes(2, 2), port=0)
    assert bring_up(pair.home, config, lambda _: None).already is True
    with pytest.raises(LifecycleError, match="take it down first"):
        bring_up(pair.home, ClusterConfig(nodes=virtual_nodes(3, 2), port=0), lambda _: None)


def test_a_port_that_is_taken_is_named(pair: Live, tmp_path: Path) -> None:
    port = int(pair.client.url.rpartition(":")[2])
    other, config = Home(tmp_path / "other"), ClusterConfig(nodes=virtual_nodes(1, 0), port=port)
    try:
        with pytest.raises(LifecycleError, match=f"port {port}.*--port 0"):
            bring_up(other, config, lambda _: None)
    finally:
        take_down(other, lambda _: None)


@pytest.fixture
def young() -> Iterator[Live]:
    """Without a history, from which it would expect that jobs like `true` are short."""
    with live_cluster(nodes=2, gpus=2) as made:
        yield made


def test_a_job_leaves_a_node_before_its_end_and_a_long_one_does_not_start_there(
    young: Live,
) -> None:
    """The margin of 10 s is over at once, so the end is near as soon as it is known."""
    job = young.run("sleep 600", gpus=2, stop_grace_ms=500, checkpoint_ms=1_000)
    assert young.wait(job, "running") == "running"
    node = young.client.job(job).nodes[0]
    write_end(young.home.node(node), time.time() + 10, "spot notice")
    until(lambda: young.client.job(job).attempt == 2)
    events = young.client.events(job=job)
    stops = [one.event for one in events.events if isinstance(one.event, JobStopping)]
    assert [stop.cause for stop in stops] == [StopCause.DRAIN]
    assert f"{node} ends in " in stops[0].why and "(spot notice)" in stops[0].why
    assert young.wait(job, "running") == "running"
    assert young.client.job(job).nodes != [node]
    write_end(young.home.node(node), time.time() + 3600, "rented")
    waiting = young.run("true", gpus=1)
    until(lambda: f"{node} has room, but ends in " in young.client.why(waiting).why)
    short = young.run("true", gpus=1, time_limit_ms=60_000)
    assert young.wait(short) == "succeeded"
    forget_end(young.home.node(node))
    assert young.wait(waiting) == "succeeded"
    young.client.cancel(job)
    assert young.wait(job) == "cancelled"


# The last one: the others need both nodes.
def test_a_node_that_a_new_configuration_drops_leaves_the_cluster(pair: Live) -> None:
    take_down(pair.home, lambda _: None)
    pair.restart(ClusterConfig(nodes=virtual_nodes(1, 2), port=0))
    until(lambda: [view.id for view in pair.client.nodes()] == ["n1"])
    job = pair.run("true", gpus=2)
    assert pair.wait(job) == "succeeded"
