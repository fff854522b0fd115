"""Idle reclaim: a gang whose GPUs are all unused is warned, then gives them back."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.core.answers.why import explain
from shoal.model.job import MemberRef, Outcome, Phase, Startup
from shoal.model.policy import Policy
from shoal.model.reason import render
from shoal.model.report import Began, Idle
from tests.core.build import Cluster, kinds

RULES = {"idle_warn_ms": 60_000, "idle_reclaim_ms": 300_000}


def cluster(**rules: Any) -> Cluster:
    made = Cluster(Policy(**{**RULES, **rules}))
    made.join("a", gpus=4)
    return made


def tell(made: Cluster, job: str, *idle_ms: int) -> list[str]:
    """Members have used nothing for so long; those that are left out work."""
    refs = [MemberRef(job, made.job(job).attempt, number) for number in range(len(idle_ms))]
    idle = tuple(Idle(ref, ms) for ref, ms in zip(refs, idle_ms, strict=True) if ms)
    return kinds(made.step(nodes=(made.books["a"].report(idle=idle),)).events)


def test_an_idle_job_is_warned_and_then_ended() -> None:
    made = cluster()
    job = made.run(gpus=2)
    made.wait(1_000_000)
    assert tell(made, job, 59_000) == []
    assert tell(made, job, 61_000) == ["JobIdled"]
    why = render(explain(made.state, made.job(job), made.policy, made.now_ms))
    assert why == "has not used its GPUs for 1m 1s; they will be reclaimed in 3m 59s"
    assert tell(made, job, 62_000) == []  # it is said once
    assert tell(made, job, 300_000) == ["JobStopping"]
    made.end(job, code=143)
    assert made.job(job).outcome is Outcome.CANCELLED
    assert made.job(job).why == "has not used its GPUs for 5m"


def test_who_works_again_is_not_idle_any_more() -> None:
    made = cluster()
    job = made.run(gpus=2)
    made.wait(1_000_000)
    tell(made, job, 61_000)
    assert tell(made, job, 0) == ["JobUsed"]
    assert made.job(job).idle_since_ms is None
    assert tell(made, job, 61_000) == ["JobIdled"]


def test_a_gang_is_idle_only_when_all_of_it_is() -> None:
    made = cluster()
    job = made.run(gpus=1, members=3)
    made.wait(1_000_000)
    assert tell(made, job, 400_000, 400_000, 0) == []
    assert tell(made, job, 400_000, 400_000, 70_000) == ["JobIdled"]
    assert tell(made, job, 400_000, 400_000, 310_000) == ["JobStopping"]


def test_a_member_that_has_ended_does_not_speak_for_one_that_works() -> None:
    """Seed 315 of the storm."""
    made = cluster()
    job = made.run(gpus=1, members=2)
    made.wait(1_000_000)
    assert tell(made, job, 400_000, 0) == []
    made.exit(job, member=0)
    assert tell(made, job, 0, 0) == ["MemberExited"]
    assert made.job(job).phase is Phase.RUNNING


def test_who_waited_for_a_member_that_worked_until_it_ended_is_idle_only_since_then() -> None:
    made = cluster()
    job = made.run(gpus=1, members=2)
    made.wait(1_000_000)
    assert tell(made, job, 0, 400_000) == []
    made.exit(job, member=0)
    assert tell(made, job, 0, 400_000) == ["MemberExited"]
    made.wait(100_000)
    assert tell(made, job, 0, 500_000) == ["JobIdled"]
    made.wait(200_000)
    assert tell(made, job, 0, 700_000) == ["JobStopping"]


@pytest.mark.parametrize(
    ("rules", "fields"),
    [
        ({"idle_warn_ms": 0, "idle_reclaim_ms": 0}, {"gpus": 1}),  # as the policy is shipped
        ({}, {"gpus": 0}),
    ],
)
def test_who_is_left_alone(rules: dict[str, int], fields: dict[str, Any]) -> None:
    made = cluster(**rules)
    job = made.run(**fields)
    made.wait(1_000_000)
    assert tell(made, job, 900_000) == []
    assert made.job(job).phase is Phase.RUNNING


def test_a_policy_may_run_it_again_but_not_for_ever() -> None:
    made = cluster(idle_ends=False)
    job = made.run(gpus=1)
    for attempt in (1, 2, 3):
        assert made.job(job).attempt == attempt
        made.wait(1_000_000)
        assert tell(made, job, 300_000) == ["JobStopping"]
        made.end(job, code=143)
        made.deliver()
        made.hear("a")
    assert made.job(job).outcome is Outcome.CANCELLED


def test_when_members_begin_to_work_is_noted_once_and_said_how_it_was_learned() -> None:
    made = cluster()
    job = made.run(gpus=1, members=2)
    first, second = (MemberRef(job, 1, number) for number in range(2))
    made.wait(40_000)
    stranger = Began(MemberRef("j99", 1, 0), 5, "gpu")

    def step(*began: Began) -> list[str]:
        made.books["a"].began = began
        events = made.step(nodes=(made.books["a"].report(),)).events
        return [event.sentence() for event in events]

    (told,) = step(Began(first, 36_000, "gpu"), stranger)
    assert told == f"{job} began to work after 36s, when its GPUs were first used"
    assert step(Began(first, 36_000, "gpu")) == []  # as long as it lives, its node says it
    (told,) = step(Began(first, 36_000, "gpu"), Began(second, 38_000, "steps"))
    assert told == f"{job} began to work after 38s, when it reported its first step (member 1)"
    assert made.job(job).startup == Startup((0, 1), 38_000, "steps")
