"""What cannot be put to sleep or woken is refused in one line that names the cause."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shoal.model.job import JobSpec, Phase
from shoal.model.report import Accepted, Refused, Request, SetPolicy, SleepJob, WakeJob
from shoal.model.sweep import IndexRange, Sweep
from tests.core.build import Cluster
from tests.core.test_sleep import cluster, nap, rouse


def message(made: Cluster, request: Request) -> str:
    answer = made.ask(request)
    assert isinstance(answer, Refused), answer
    assert "\n" not in answer.message
    return answer.message


NODES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"no_sleep": True}, "it was submitted with --no-sleep"),
    (
        {"sleep": "", "sleep_why": "its driver is 535, and 570 is needed"},
        {},
        "a cannot put jobs to sleep: its driver is 535, and 570 is needed",
    ),
    ({"sleep": ""}, {}, "a cannot put jobs to sleep: its agent is older"),
    (
        {"sleep": "cuda", "gpu_memory_mb": 80_000, "memory_mb": 100_000},
        {},
        "it may need 80000 MB of a's memory to sleep, and of the 50000 MB that the policy allows "
        "(sleep_memory_percent) 50000 MB are left",
    ),
    (
        {"sleep": "cuda", "gpu_memory_mb": 40_000, "memory_mb": 100_000},
        {"memory_mb": 90_000},
        "it may need 40000 MB of a's memory to sleep, and 10000 MB are free",
    ),
]


@pytest.mark.parametrize(("node", "job", "why"), NODES)
def test_a_job_that_cannot_sleep_goes_on_and_the_answer_says_why(
    node: dict[str, Any], job: dict[str, Any], why: str
) -> None:
    made = Cluster()
    made.join("a", **{"gpus": 1, "sleep": "freeze", **node})
    one = made.run(gpus=1, **job)
    assert message(made, SleepJob(one, "ann")) == f"{one} cannot be put to sleep: {why}"
    assert made.job(one).phase is Phase.RUNNING


def test_only_what_runs_sleeps_and_only_what_sleeps_wakes() -> None:
    made = cluster()
    one = made.run(gpus=1)
    waiting = made.submit(gpus=1)
    only = "it is waiting, and only a running job can be put to sleep"
    assert message(made, SleepJob(waiting)) == f"{waiting} cannot be put to sleep: {only}"
    assert message(made, WakeJob(waiting)) == f"{waiting} is not asleep: it is waiting"
    assert message(made, WakeJob(one)) == f"{one} is not asleep: it is running"
    assert isinstance(made.ask(WakeJob(one, why="ann ran shoal exec")), Accepted), "it was used"
    assert message(made, SleepJob("j99")) == "there is no live job j99"
    array = JobSpec(command=("x",), sweep=Sweep(ranges=(IndexRange(5, 9),)))
    many = made.submit(sweep=array.sweep)
    for request in (SleepJob(many), WakeJob(many)):
        said = f"{many} is an array; name one of its elements, e.g. {many}.5"
        assert message(made, request) == said


def test_to_ask_twice_changes_nothing() -> None:
    made = cluster()
    one = made.run(gpus=1)
    assert made.ask(SleepJob(one)) == Accepted(one)
    made.deliver()
    assert made.ask(SleepJob(one)) == Accepted(one, "it is already falling asleep")
    nap(made, one)
    assert made.ask(SleepJob(one)) == Accepted(one, "it is already asleep")
    events = len(made.log)
    assert made.ask(WakeJob(one)) == Accepted(one)
    made.deliver()
    assert made.ask(WakeJob(one)) == Accepted(one, "it is waking")
    rouse(made, one)
    assert made.job(one).phase is Phase.RUNNING
    kinds = [type(event).__name__ for event in made.log[events:]]
    assert kinds == ["JobTouched", "JobWaking", "MembersAwake", "JobAwake"]


def test_a_policy_that_allows_fewer_sleepers_may_come_in_the_step_in_which_one_falls_asleep() -> (
    None
):
    made = cluster()
    one = made.run(gpus=1)
    fewer = msgspec.structs.replace(made.policy, sleepers_max=0)
    done = made.step(requests=(SleepJob(one, "ann"), SetPolicy(fewer, "ann")))
    assert all(isinstance(answer, Accepted) for answer in done.answers)
    assert made.job(one).phase is Phase.DOZING
