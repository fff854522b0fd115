"""Sleep: a job gives up its GPUs and goes on later where it was."""

from __future__ import annotations

from typing import Any

from shoal.core.answers.why import explain
from shoal.model.commands import Sleep, Wake
from shoal.model.job import MemberRef, Phase
from shoal.model.policy import Policy, Sleeping
from shoal.model.reason import render
from shoal.model.report import Accepted, Refused, SleepJob, WakeJob
from tests.core.build import Cluster, kinds

CALM: dict[str, Any] = {"run_ms_min": 0, "silent_after_ms": 10**9, "grace_ms": 10**9}


def cluster(*names: str, gpus: int = 1, sleep: str = "freeze", **rules: Any) -> Cluster:
    made = Cluster(Policy(**{**CALM, **rules}))
    for name in names or ("a",):
        made.join(name, gpus=gpus, sleep=sleep)
    return made


def nap(made: Cluster, job: str, memory_mb: int = 0) -> None:
    """Its nodes have put all of it to sleep, and say so."""
    made.deliver()
    record = made.job(job)
    for number, member in enumerate(record.members):
        made.books[member.slice.node].slept(MemberRef(job, record.attempt, number), memory_mb, 100)
    made.hear(*dict.fromkeys(member.slice.node for member in record.members))


def rouse(made: Cluster, job: str) -> None:
    made.deliver()
    record = made.job(job)
    for number, member in enumerate(record.members):
        made.books[member.slice.node].awoke(MemberRef(job, record.attempt, number), 50)
    made.hear(*dict.fromkeys(member.slice.node for member in record.members))


def test_a_sleeper_gives_its_gpu_to_another_job_and_gets_it_back() -> None:
    made = cluster()
    job = made.run(gpus=1, time_limit_ms=100_000)
    made.wait(10_000)
    assert made.ask(SleepJob(job, "ann")) == Accepted(job)
    assert made.job(job).phase is Phase.DOZING
    assert [type(command) for command in made.last.commands] == [Sleep]
    made.deliver()
    other = made.submit(gpus=1)
    assert made.job(other).phase is Phase.WAITING
    nap(made, job)
    assert made.job(job).phase is Phase.ASLEEP
    assert made.job(other).phase is Phase.STARTING
    made.deliver()
    made.hear("a")
    assert made.job(other).phase is Phase.RUNNING
    made.wait(500_000)
    assert isinstance(made.ask(WakeJob(job, "ann")), Accepted)
    assert made.job(job).phase is Phase.ASLEEP
    why = render(explain(made.state, made.job(job), made.policy, made.now_ms))
    room = f"it sleeps on a, where 1 GPU, 1 CPU is not free; {other} runs there"
    assert why == f"is waking because ann asked; {room}"
    made.end(other)
    assert made.job(job).phase is Phase.WAKING
    assert Wake in [type(command) for command in made.last.commands]
    rouse(made, job)
    assert made.job(job).phase is Phase.RUNNING
    assert made.job(job).slept_ms >= 500_000
    made.wait(80_000)  # of its time limit of 100 s it has used 10 s before it slept
    made.hear("a")
    assert made.job(job).phase is Phase.RUNNING
    made.wait(20_000)
    made.hear("a")
    assert made.job(job).phase is Phase.STOPPING


def test_preemption_puts_to_sleep_what_can_sleep() -> None:
    made = cluster()
    low = made.run(gpus=1, preemptible=True, checkpoint_ms=60_000)
    made.wait(600_000)
    high = made.submit(gpus=1, priority=10)
    assert made.job(low).phase is Phase.DOZING
    nap(made, low)
    assert made.job(high).phase is Phase.STARTING
    made.deliver()
    made.hear("a")
    made.wait(60_000)
    made.end(high)
    assert made.job(low).phase is Phase.WAKING
    rouse(made, low)
    assert made.job(low).phase is Phase.RUNNING
    assert made.job(low).attempt == 1


def test_a_policy_without_sleep_stops_as_before() -> None:
    made = cluster()
    made.policy = Policy(**CALM, sleep=Sleeping.NEVER)
    low = made.run(gpus=1, preemptible=True, checkpoint_ms=60_000)
    made.wait(600_000)
    made.submit(gpus=1, priority=10)
    assert made.job(low).phase is Phase.STOPPING


def test_if_one_member_refuses_all_are_woken_and_the_old_way_is_taken() -> None:
    made = cluster("a", "b")
    low = made.run(gpus=1, members=2, preemptible=True, checkpoint_ms=60_000)
    made.wait(600_000)
    high = made.submit(gpus=1, members=2, priority=10)
    assert made.job(low).phase is Phase.DOZING
    made.deliver()
    refs = [MemberRef(low, 1, number) for number in range(2)]
    made.books["a"].slept(refs[0], 0, 100)
    made.hear("a")
    made.books["b"].refuses(refs[1], "the driver is too old")
    assert "SleepRefused" in kinds(made.hear("b").events)
    assert made.job(low).phase is Phase.WAKING
    made.deliver()
    made.hear("b")
    made.books["a"].awoke(refs[0], 10)
    made.hear("a")
    assert made.job(low).phase is Phase.STOPPING
    assert made.job(low).refused == "member 1 on b could not be put to sleep: the driver is too old"
    made.end(low, code=143)
    made.end(low, code=143, member=1)
    assert made.job(high).phase is Phase.STARTING


def test_what_cannot_sleep_is_refused_in_one_line() -> None:
    made = cluster(sleep="")
    job = made.run(gpus=1)
    answer = made.ask(SleepJob(job))
    assert isinstance(answer, Refused)
    reason = "a cannot put jobs to sleep: its agent is older"
    assert answer.message == f"{job} cannot be put to sleep: {reason}"
    answer = made.ask(WakeJob(job))
    assert isinstance(answer, Refused)
    assert answer.message == f"{job} is not asleep: it is running"


def test_more_jobs_than_gpus_take_turns() -> None:
    made = cluster(turn_cost_percent=5, turn_ms_min=30_000)
    first = made.run(gpus=1)
    second = made.submit(gpus=1)
    assert made.job(second).phase is Phase.WAITING
    made.wait(31_000)
    made.hear("a")
    assert made.job(first).phase is Phase.DOZING
    nap(made, first)
    made.deliver()
    made.hear("a")
    assert made.job(second).phase is Phase.RUNNING
    made.wait(31_000)
    made.hear("a")
    assert made.job(second).phase is Phase.DOZING
    nap(made, second)
    rouse(made, first)
    assert made.job(first).phase is Phase.RUNNING
    assert made.job(second).phase is Phase.ASLEEP


def test_a_sleeper_wakes_when_an_open_session_of_it_is_used_and_each_use_counts_once() -> None:
    made = cluster()
    job = made.run(gpus=1)
    ref = MemberRef(job, 1, 0)
    made.books["a"].touch(ref)  # while it is awake: that is nothing new
    made.ask(SleepJob(job, "ann"))
    nap(made, job)
    made.hear("a")
    assert made.job(job).phase is Phase.ASLEEP
    other = made.run(gpus=1)
    made.books["a"].touch(ref)
    made.hear("a")
    assert made.job(job).wants
    assert made.job(job).why == "is waking because one of its sessions was used"
    made.ask(SleepJob(job, "ann"))  # it sleeps on, although the node still reports that touch
    made.hear("a")
    assert not made.job(job).wants
    made.books["a"].touch(ref)
    made.hear("a")
    made.end(other)
    rouse(made, job)
    assert made.job(job).phase is Phase.RUNNING
    assert made.books["a"].report().touched == ()


def test_for_a_job_that_wants_whole_nodes_others_are_stopped_because_a_sleeper_would_stay() -> None:
    made = cluster()
    low = made.run(gpus=1, preemptible=True, checkpoint_ms=60_000)
    made.wait(600_000)
    high = made.submit(gpus=1, priority=10, whole_nodes=True)
    assert made.job(low).phase is Phase.STOPPING
    made.end(low, code=143)
    assert made.job(high).phase is Phase.STARTING
