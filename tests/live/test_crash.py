"""The real thing killed at random: every job ends exactly once, as asked, and nothing stays."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from harness.waiting import until

from shoal.api.timeline import TimelineView
from shoal.control.past.bars import Bar, Book
from shoal.core.state.events.runs import JobFinished
from shoal.machine.exits import read_exits
from tests.live.cluster import Live, live_cluster

# Each member notes its start and its end; a start noted twice would be a member run twice.
SCRIPT = """
echo "start $SHOAL_JOB_ID.$SHOAL_ATTEMPT.$SHOAL_MEMBER" >> {diary}
sleep {seconds}
echo "end $SHOAL_JOB_ID.$SHOAL_ATTEMPT.$SHOAL_MEMBER" >> {diary}
exit {code}
"""


@pytest.mark.parametrize(
    ("jobs", "controllers", "agents"),
    [(30, 4, 2), pytest.param(400, 60, 20, marks=pytest.mark.soak)],
)
def test_no_job_is_lost_or_run_twice_when_controllers_and_agents_are_killed(
    jobs: int, controllers: int, agents: int, tmp_path: Path
) -> None:
    seed = int(os.environ.get("SHOAL_SEED", "20261115"))
    rng = random.Random(seed)
    diary = tmp_path / "diary"
    diary.touch()
    with live_cluster(nodes=4, gpus=8) as live:
        asked: dict[str, tuple[str, int, int]] = {}
        killer = Killer(live, rng.randrange(2**32), controllers, agents)
        killer.start()
        try:
            for number in range(jobs):
                members, code = rng.choice([1, 1, 1, 2, 3]), rng.choice([0, 0, 0, 3])
                seconds = rng.choice([0, 0.05, 0.3, 1.0])
                job = live.run(
                    SCRIPT.format(diary=diary, seconds=seconds, code=code),
                    members=members,
                    gpus=rng.choice([0, 1, 2, 4]),
                    stop_grace_ms=500,
                )
                asked[job] = ("failed" if code else "succeeded", code, members)
                if number % 10 == 0:
                    time.sleep(rng.uniform(0, 0.4))  # so that jobs flow while things are killed
            assert len(asked) == jobs, "every submission made a job of its own"
        finally:
            killer.join()
        assert killer.error is None, killer.error
        for job, (state, code, _) in asked.items():
            assert live.wait(job, timeout_s=120) == state, f"seed {seed}: {live.client.why(job)}"
            assert live.client.job(job).code == code
        check_diary(diary, asked)
        check_log(live, asked, controllers)
        until(lambda: not live.member_processes(), "members were left behind")


def test_what_ended_while_nobody_could_store_it_ran_once(tmp_path: Path) -> None:
    """The controller stands still, a job ends, its agent dies, the controller is killed."""
    diary, go = tmp_path / "diary", tmp_path / "go"
    script = f"echo start >> {diary}; while ! test -e {go}; do sleep 0.05; done; echo done"
    with live_cluster(nodes=2, gpus=1) as live:
        job = live.run(script, gpus=1)
        until(diary.exists)
        node = live.client.job(job).nodes[0]
        os.kill(live.controller_pid(), signal.SIGSTOP)
        members = live.home.nodes / node / "members"
        go.touch()
        until(lambda: bool(read_exits(members)))
        live.kill_agent(node)
        live.kill_controller()
        assert live.wait(job, timeout_s=120) == "succeeded"
        assert diary.read_text() == "start\n" and live.client.job(job).attempt == 1
        until(lambda: "done" in live.output(job), "its output comes, too")
        until(lambda: not read_exits(members), "acknowledged")


class Killer(threading.Thread):
    """Kills controllers and agents at random moments, each as soon as there is one to kill."""

    def __init__(self, live: Live, seed: int, controllers: int, agents: int) -> None:
        super().__init__()
        self._live = live
        self._deeds = ["controller"] * controllers + ["agent"] * agents
        self._rng = random.Random(seed)
        self.error: Exception | None = None

    def run(self) -> None:
        self._rng.shuffle(self._deeds)
        last = 0
        try:
            for deed in self._deeds:
                time.sleep(self._rng.uniform(0, 0.6))
                if deed == "controller":
                    until(lambda last=last: self._live.controller_pid() != last)  # type: ignore[misc]
                    last = self._live.kill_controller()
                else:
                    self._live.kill_agent(f"n{self._rng.randint(1, 4)}")
        except Exception as error:
            self.error = error


def check_diary(diary: Path, asked: dict[str, tuple[str, int, int]]) -> None:
    lines = Counter(diary.read_text().split("\n"))
    for line, count in lines.items():
        assert not line or count == 1, f"{line!r} happened {count} times"
    ends: Counter[tuple[str, str]] = Counter()
    for line in lines:
        if line.startswith("end "):
            job, attempt, _ = line.removeprefix("end ").split(".")
            ends[job, attempt] += 1
    for job, (state, _, members) in asked.items():
        if state == "succeeded":
            assert any(ends[key] == members for key in ends if key[0] == job), (
                f"{job} never ran whole"
            )


def check_log(live: Live, asked: dict[str, tuple[str, int, int]], controllers: int) -> None:
    finished: Counter[str] = Counter()
    book, bars, after = Book(), dict[int, Bar](), 0
    while True:
        view = live.client.events(after=after, limit=5000)
        for recorded in view.events:
            if isinstance(recorded.event, JobFinished):
                finished[recorded.event.job] += 1
            book.take(recorded.event)
            if view.events[-1] is recorded:
                bars.update((bar.number, bar) for bar in book.drain().bars)
        if not view.events:
            break
        after = view.next_after
    assert finished == Counter(dict.fromkeys(asked, 1))
    shown = live.client.request("GET", "/v1/timeline?from_ms=1", TimelineView)
    assert shown.left_out == 0
    named = Counter(
        (shown.nodes[b.node].id, b.gpus, b.job, b.attempt, b.member, b.begin_ms, b.end_ms, b.why)
        for b in shown.bars
    )
    assert named == Counter(
        (b.node, b.gpus, b.job, b.attempt, b.member, b.begin_ms, b.end_ms, b.why)
        for b in bars.values()
    ), "no bar is missing, and none is there twice"
    epoch = live.client.status().epoch
    assert epoch > controllers * 0.8, "the controller really was killed again and again"
