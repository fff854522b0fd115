"""A real Ray under a real cluster: jobs run, and no death of Ray's disturbs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.ray.cluster import kill_ray, ray_cluster, reach, second_home, shoal
from tests.live.cluster import Live, eventually
from tests.needs import need

need("ray")


BOUND_S = 90


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with ray_cluster("--gpus", "2", "--cpus", "16") as cluster:
        yield cluster


class Undisturbed:
    """A job that runs until it is let go: what happens meanwhile must not touch it."""

    def __init__(self, live: Live, flag: Path) -> None:
        self._live = live
        self._flag = flag
        self._job = live.run(
            f"echo $$; until test -e {flag}; do sleep 0.05; done; echo let go; exit 5"
        )
        assert live.wait(self._job, "running") == "running"

    def must_end_as_if_nothing_had_been(self) -> None:
        assert self._live.client.job(self._job).state == "running"
        self._flag.touch()
        assert self._live.wait(self._job, timeout_s=BOUND_S) == "failed"
        job = self._live.client.job(self._job)
        assert (job.code, job.attempt) == (5, 1)
        assert self._live.output(self._job).endswith("let go\n")


def starts_of_ray(live: Live) -> int:
    return (live.home.ray / "starter.log").read_text().count("starting Ray")


def must_work(live: Live) -> None:
    """Commands reach the node and its answers come back."""
    assert live.wait(live.run("true"), timeout_s=BOUND_S) == "succeeded"


@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_a_job_runs_with_its_output_its_code_and_its_gpus(live: Live) -> None:
    job = live.run("echo on $CUDA_VISIBLE_DEVICES of $SHOAL_NODE; env | grep ^RAY_; exit 7", gpus=2)
    assert live.wait(job) == "failed"
    node = live.client.nodes()[0]
    assert live.output(job) == f"on 0,1 of {node.id}\n"
    assert live.client.job(job).code == 7


@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_much_output_arrives_whole(live: Live) -> None:
    job = live.run("seq 1 300000")
    assert live.wait(job) == "succeeded"
    end = live.client.logs(job, offset=-7)
    assert end.data == b"300000\n"
    assert end.next_offset == sum(len(str(number)) + 1 for number in range(1, 300_001))


@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_a_killed_controller_comes_back_and_takes_the_posts_over(
    live: Live, tmp_path: Path
) -> None:
    job = Undisturbed(live, tmp_path / "flag")
    live.kill_controller()
    must_work(live)
    job.must_end_as_if_nothing_had_been()


@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_a_killed_raylet_disturbs_no_job(live: Live, tmp_path: Path) -> None:
    job = Undisturbed(live, tmp_path / "flag")
    before = starts_of_ray(live)
    assert kill_ray(live.home.path, "raylet") == 1
    assert eventually(lambda: starts_of_ray(live) > before, BOUND_S)
    must_work(live)
    job.must_end_as_if_nothing_had_been()


@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_a_killed_agent_is_known_to_be_dead_and_started_again(live: Live) -> None:
    """No grace time passes: its lock was free on a machine that lives."""
    job = live.run("sleep 1000", restart="on-failure")
    live.wait(job, "running")
    (node,) = live.client.nodes()
    live.kill_agent(node.id)
    assert eventually(lambda: live.client.nodes()[0].incarnation > node.incarnation, BOUND_S)
    events = live.client.events(node=node.id).events
    assert any("its agent died" in event.event.why for event in events)  # type: ignore[union-attr]
    live.client.cancel(job)
    must_work(live)


@pytest.mark.outside("Ray starts its processes and gives up on them by its own clocks")
def test_a_second_machine_joins_works_and_leaves(live: Live, tmp_path: Path) -> None:
    """Two homes on one machine stand for two machines: each has its own Ray, ports and agent."""
    head, token = reach(live), str(live.home.ray / "token")
    with second_home() as home:
        joined = shoal(home, "join", head, "--name", "n2", "--cpus", "16", "--token-file", token)
        assert joined.returncode == 0, joined.stderr
        assert "n2 joined the cluster" in joined.stdout
        again = shoal(home, "join", head)
        assert again.returncode == 0
        assert "n2 is already in the cluster" in again.stdout
        gang = live.run("echo $SHOAL_NODE", members=2, cpu_milli=9_000)
        assert live.wait(gang, timeout_s=BOUND_S) == "succeeded"
        assert {live.output(gang, member=0), live.output(gang, member=1)} >= {"n2\n"}
        assert_refused_joins(live, head, token)
        assert_a_killed_head_disturbs_nobody(live, home, tmp_path)
        jobs = [live.run("sleep 1000", cpu_milli=9_000) for _ in range(2)]
        assert all(live.wait(job, "running") == "running" for job in jobs)
        left = shoal(home, "leave", "--json")
        assert left.returncode == 0, left.stderr
        assert [node.id for node in live.client.nodes() if node.id == "n2"] == []
        assert shoal(home, "leave").stdout.endswith("nothing to do\n")
        # The one that was there waits for room elsewhere, at no cost to its retries.
        assert sorted(live.client.job(job).state for job in jobs) == ["running", "waiting"]
        for job in jobs:
            live.client.cancel(job)
    must_work(live)


def assert_a_killed_head_disturbs_nobody(live: Live, home: Path, tmp_path: Path) -> None:
    """Ray's state is gone with it; its members find the new one."""
    job = Undisturbed(live, tmp_path / "flag")
    contact = home / "nodes" / "n2" / "contact"
    before, spoken = starts_of_ray(live), contact.stat().st_mtime_ns
    assert kill_ray(live.home.path, "gcs_server") == 1
    assert eventually(lambda: starts_of_ray(live) > before, BOUND_S)
    assert eventually(lambda: contact.stat().st_mtime_ns > spoken, BOUND_S)
    must_work(live)
    job.must_end_as_if_nothing_had_been()
    assert eventually(lambda: {n.health for n in live.client.nodes()} == {"ready"}, BOUND_S)


def assert_refused_joins(live: Live, head: str, token: str) -> None:
    """What cannot work is told in one line before anything starts."""
    with second_home() as home:
        wrong = home / "wrong"
        wrong.write_text("0123456789abcdef0123456789abcdef")
        cases = [
            (("join", head, "--token-file", str(wrong)), "the token is not the one"),
            (("join", head, "--token-file", token, "--name", "n2"), "the name n2 is taken"),
            (("join", "127.0.0.1:1", "--token-file", token), "nobody answers at 127.0.0.1:1"),
            (("up", "--engine", "ray", "--address", head, "--token-file", str(wrong)), "the token"),
        ]
        for args, words in cases:
            refused = shoal(home, *args)
            assert refused.returncode == 1
            (line,) = [one for one in refused.stderr.splitlines() if one.startswith("error: ")]
            assert words in line
        assert not (home / "ray" / "starter.log").exists()
