"""Successive halving: trials are judged when they reach a rung, and the worst stop early."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from shoal.core.invariants import verify
from shoal.core.state.apply import replay
from shoal.core.state.events.arrays import TrialJudged
from shoal.core.state.events.runs import JobStopping
from shoal.core.state.state import State
from shoal.model.job import MemberRef, Outcome, Phase, StopCause
from shoal.model.progress import Beat, Progress
from shoal.model.report import Refused, Submit
from tests.core.build import Cluster, job_spec
from tests.core.test_arrays import settle


def sweep(count: int = 9, **fields: Any) -> dict[str, Any]:
    return {"ranges": [[0, count - 1, 1]], "halve": 3, **fields}


def running(**fields: Any) -> tuple[Cluster, str]:
    made = Cluster()
    made.join("a", gpus=0, cpus=10_000)
    array = made.submit(sweep=sweep(**fields))
    settle(made)
    assert all(job.phase is Phase.RUNNING for job in made.state.jobs.values())
    return made, array


def beat(made: Cluster, job: str, step: int, loss: float, **more: Any) -> None:
    ref = MemberRef(job, 1, 0)
    told = Beat(ref=str(ref), step=step, steps=step, compute_us=step, loss=loss, **more)
    report = msgspec.structs.replace(made.books["a"].report(), progress=(Progress(ref, told, 0),))
    made.wait(1)
    made.hear_reports(report)


def stopped(made: Cluster) -> list[str]:
    return [
        event.job
        for event in made.log
        if isinstance(event, JobStopping) and event.cause is StopCause.HALVING
    ]


def end(made: Cluster, job: str) -> None:
    made.deliver()
    made.exit(job, 143)
    made.hear("a")


def test_a_trial_is_judged_against_those_that_reached_the_rung_before_it() -> None:
    made, array = running(rung=10)
    losses = [5.0, 4.0, 6.0, 3.0, 9.0, 2.0, 7.0, 8.0, 2.5]
    for index, loss in enumerate(losses):
        beat(made, f"{array}.{index}", 9, loss)  # not there yet
        assert not stopped(made) or f"{array}.{index}" not in stopped(made)
        beat(made, f"{array}.{index}", 11, loss)
    judged = [event for event in made.log if isinstance(event, TrialJudged)]
    assert [(one.rank, one.count) for one in judged] == [
        (1, 1), (1, 2), (3, 3), (1, 4), (5, 5), (1, 6), (6, 7), (7, 8), (2, 9),
    ]  # fmt: skip
    # The first two have nobody to be compared with; then a third of those who came goes on.
    assert stopped(made) == [f"{array}.{index}" for index in (2, 4, 6, 7)]
    why = made.job(f"{array}.7").why
    assert why == "stopped early at step 11: loss 8 is 7th of 8, and the best 2 go on"
    # Nobody is judged twice, and the next rung is three times as far.
    beat(made, f"{array}.5", 29, 2.0)
    beat(made, f"{array}.5", 30, 2.0)
    last = made.log[-1]
    assert isinstance(last, TrialJudged)
    assert (last.rung, last.at_step, last.goes_on) == (1, 30, True)


def test_a_trial_that_stops_early_has_ended_well_and_the_array_and_what_waits_for_it_go_on() -> (
    None
):
    made, array = running(count=3, rung=1, halve=2, by="accuracy", highest=True)
    after = made.submit(after=(array,))
    for index, accuracy in enumerate((0.5, 0.9, 0.1)):
        beat(made, f"{array}.{index}", 1, 0.0, metrics={"accuracy": accuracy})
    assert stopped(made) == [f"{array}.2"]
    end(made, f"{array}.2")
    halted = made.finished[f"{array}.2"]
    assert (halted.outcome, halted.code) == (Outcome.SUCCEEDED, 0)
    assert halted.why.startswith("stopped early at step 1: accuracy 0.1 is 3rd of 3")
    for index in (0, 1):
        made.exit(f"{array}.{index}", 0)
    made.hear("a")
    record = made.finished[array]
    assert record.outcome is Outcome.SUCCEEDED
    assert record.why == "3 of 3 done, 1 stopped early"
    assert made.job(after).phase is not Phase.WAITING


def test_a_value_that_is_not_a_number_is_the_worst_and_none_reported_is_not_judged() -> None:
    made, array = running(count=4, rung=5, halve=2)
    beat(made, f"{array}.0", 5, math.nan)
    beat(made, f"{array}.1", 5, math.inf)
    assert not stopped(made), "as bad as the others"
    beat(made, f"{array}.2", 5, 1e30)
    beat(made, f"{array}.3", 50, 0.0, metrics={})
    assert stopped(made) == []
    other, array = running(count=3, rung=5, halve=2)
    for index, loss in enumerate((1.0, 2.0, math.nan)):
        beat(other, f"{array}.{index}", 5, loss)
    assert stopped(other) == [f"{array}.1", f"{array}.2"]


def test_the_first_rung_follows_from_the_length_of_the_trials() -> None:
    made, array = running(count=3)
    beat(made, f"{array}.0", 99, 1.0, steps_total=900)
    assert not [event for event in made.log if isinstance(event, TrialJudged)]
    beat(made, f"{array}.0", 899, 1.0, steps_total=900)
    judged = [event for event in made.log if isinstance(event, TrialJudged)]
    assert [one.at_step for one in judged] == [100, 300], "900 is its end"
    beat(made, f"{array}.1", 100, 2.0)  # one that does not say how long it is
    assert made.state.arrays[array].elements.first_rung == 100  # type: ignore[union-attr]


def test_after_a_crash_the_log_has_decided_the_same_and_nobody_is_judged_again() -> None:
    made, array = running(rung=10)
    for index in range(6):
        beat(made, f"{array}.{index}", 10, float(index))
    before = made.state.arrays[array].elements
    made.controller.load()  # a controller that was killed begins with the log
    made.controller.begin(made.now_ms)
    elements = made.state.arrays[array].elements
    assert elements is not None
    assert elements == before
    assert replay(State(), made.log).arrays[array].elements == before
    count = len([event for event in made.log if isinstance(event, TrialJudged)])
    for index in range(6):
        made.hear("a")
        if made.job(f"{array}.{index}").phase is Phase.RUNNING:
            beat(made, f"{array}.{index}", 11, 99.0)
    assert len([event for event in made.log if isinstance(event, TrialJudged)]) == count
    assert stopped(made) == [f"{array}.{index}" for index in (2, 3, 4, 5)]


def test_a_wrong_book_is_found() -> None:
    made, array = running(count=3, rung=10, halve=2)
    for index in range(3):
        beat(made, f"{array}.{index}", 10, float(index))
    elements = made.state.arrays[array].elements
    assert elements is not None
    elements.halted.add(0)
    with pytest.raises(AssertionError, match="the best trial of j1 at its rung was stopped early"):
        verify(made.state)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"halve": 0, "rung": 5}, "is missing; write e.g. halve: 3"),
        ({"halve": 0, "by": "accuracy"}, "is missing"),
        ({"halve": 1}, "write 2 or more"),
        ({"count": 10_001}, "takes at most 10,000 trials, not 10,001"),
    ],
)
def test_what_cannot_be_halved_is_refused(fields: dict[str, Any], said: str) -> None:
    answer = Cluster().ask(Submit(job_spec(sweep=sweep(**fields))))
    assert isinstance(answer, Refused)
    assert answer.field == "halve"
    assert said in answer.message
