"""Two heads of one cluster, with a real PostgreSQL: any one of them may be lost at any moment.

The second head's clock is an hour ahead. One job with a time limit of half an hour runs through all
of it, and must neither end nor start again.
"""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import pytest
from harness.heads import Head, Pair, off_by, pair
from harness.waiting import until

from shoal.core.state.events.cluster import ControllerStarted
from shoal.model.job import JobSpec
from tests.needs import need, need_program

need("postgres")

HOUR_MS = 3_600_000
DRIFT_MS_MAX = 120_000


class World(NamedTuple):
    pair: Pair
    job: str  # runs through all of it
    trace: Path  # a line for each of its starts
    end: Path  # it ends when this file is there


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    need_program("cc")
    folder = tmp_path_factory.mktemp("traces")
    trace, end = folder / "trace", folder / "end"
    with pair(off_by(3_600, folder)) as heads:
        script = f"echo started >> {trace}; until [ -e {end} ]; do sleep 0.1; done"
        job = submit(heads.first, script, "through", time_limit_ms=HOUR_MS // 2)
        wait_for(heads.first, job, "running")
        link = heads.first.home.node(f"{heads.first.name}-n1") / "link.json"
        until(lambda: heads.second.url in link.read_text(), "the node to know both heads")
        yield World(heads, job, trace, end)


def submit(head: Head, script: str, key: str, **fields: Any) -> str:
    env = {"PATH": os.environ["PATH"]}
    spec = msgspec.convert({"command": ("sh", "-c", script), "env": env, **fields}, JobSpec)
    return head.client.submit(spec, key=key).id


def wait_for(head: Head, job: str, state: str) -> None:
    until(lambda: head.client.job(job).state == state, f"{job} to be {state}")


def still_runs(world: World, head: Head) -> None:
    job = head.client.job(world.job)
    assert (job.state, job.attempt) == ("running", 1), job.why
    assert world.trace.read_text() == "started\n"


def bring_back(world: World, head: Head) -> None:
    head.shoal("up")
    until(lambda: _role(world.pair.other(head), head) == "standby", f"{head.name} to be a standby")


def _role(asked: Head, of: Head) -> str:
    return next((one.role for one in asked.client.heads() if one.name == of.name), "")


def test_either_head_takes_submissions_and_both_show_them(world: World) -> None:
    first, second = world.pair.heads
    jobs = [submit(head, "true", f"either {head.name}") for head in (first, second)]
    for asked in (first, second):
        for job in jobs:
            wait_for(asked, job, "succeeded")
        assert [one.name for one in asked.client.heads() if one.role == "leads"] == [first.name]
        assert submit(asked, "true", f"either {first.name}") == jobs[0]
    shown = second.shoal("heads")
    assert "standby" in shown and "leads" in shown
    still_runs(world, second)


def test_when_the_leader_is_killed_the_standby_leads_and_jobs_go_on(world: World) -> None:
    first, second = world.pair.heads
    before = submit(first, "true", "before")
    first.kill()
    assert submit(second, "true", "before") == before
    after = submit(second, "true", "after")
    assert after != before
    assert world.pair.leader() is second
    still_runs(world, second)
    bring_back(world, first)
    for job in (before, after):
        wait_for(first, job, "succeeded")
    newest = first.client.events(after=-1, limit=1).events[0]
    assert abs(newest.event.at_ms - time.time() * 1000) < DRIFT_MS_MAX  # not an hour ahead


def test_a_leader_that_was_stopped_does_nothing_when_it_goes_on(world: World) -> None:
    leader = world.pair.leader()
    other, (_, pid), term = world.pair.other(leader), leader.pids(), world.pair.term()
    where = urlsplit(leader.url)
    line = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    token = {"Authorization": f"Bearer {leader.home.read_token()}"}
    line.request("GET", "/v1/status", headers=token)
    assert line.getresponse().read()
    os.kill(pid, signal.SIGSTOP)
    job = submit(other, "true", "while it is stopped")
    assert world.pair.leader() is other and world.pair.term() == term + 1
    seq = other.client.status().last_seq
    line.request("GET", "/v1/status", headers=token)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        line.getresponse()
    until(lambda: leader.pids()[1] != pid, "the process that was stopped to end")
    assert "begins again as a standby" in leader.said()
    until(lambda: _role(other, leader) == "standby", f"{leader.name} to be a standby")
    assert world.pair.leader() is other and world.pair.term() == term + 1
    since = other.client.events(after=seq, limit=1000).events
    assert not [one for one in since if isinstance(one.event, ControllerStarted)]
    wait_for(leader, job, "succeeded")
    still_runs(world, leader)


def test_a_leader_whose_link_to_the_database_is_cut_makes_room_for_the_other(world: World) -> None:
    first, second = world.pair.heads
    if world.pair.leader() is second:
        second.shoal("down")  # gives the lease up, so that the other leads at once
        world.pair.wait_for_leader(first)
        bring_back(world, second)
    submit(first, "true", "before the cut")
    world.pair.wire.cut()
    job = submit(second, "true", "during the cut")
    assert world.pair.leader() is second
    world.pair.wire.mend()
    until(lambda: _role(second, first) == "standby", f"{first.name} to be a standby")
    wait_for(first, job, "succeeded")
    still_runs(world, first)


def test_a_database_that_restarts_ends_nothing(world: World) -> None:
    leader = world.pair.leader()
    world.pair.server.kill()
    other = world.pair.other(leader)
    with pytest.raises(Exception, match=r"database|does not answer|no head leads|does not lead"):
        _submit_now(other)
    world.pair.server.start()
    for head in world.pair.heads:
        wait_for(head, submit(head, "true", f"after the restart {head.name}"), "succeeded")
    still_runs(world, other)


def _submit_now(head: Head) -> None:
    """Without patience."""
    from shoal.client import Client

    with Client.at_home(head.home.path, patience_s=0) as client:
        client.submit(JobSpec(command=("true",)))


def test_in_the_end_the_job_was_run_once(world: World) -> None:
    world.end.touch()
    for head in world.pair.heads:
        wait_for(head, world.job, "succeeded")
        assert head.client.job(world.job).attempt == 1
    assert world.trace.read_text() == "started\n"
