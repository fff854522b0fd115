"""The checker finds each way in which a cluster could break its word, and nothing in a good one."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.history import FAIL, OK, UNKNOWN, Launched, Op, Seen, check, checksum
from harness.records import launched_on

from shoal.core.state.events.arrays import ArrayRetried
from shoal.core.state.events.log import Event, Recorded
from shoal.core.state.events.queue import JobSubmitted
from shoal.core.state.events.runs import (
    JobFinished,
    JobPlaced,
    JobRequeued,
    JobRunning,
    JobStopping,
)
from shoal.model.job import JobSpec, Outcome, StopCause

SPEC = JobSpec(command=("true",))


def log(*events: Event) -> list[Recorded]:
    return [Recorded(seq, event) for seq, event in enumerate(events, 1)]


def submitted(job: str = "j1", key: str = "k1") -> JobSubmitted:
    return JobSubmitted(at_ms=1_000, job=job, spec=SPEC, key=key)


def placed(job: str = "j1", attempt: int = 1) -> JobPlaced:
    return JobPlaced(at_ms=2_000, job=job, attempt=attempt, slices=(), master="", why="")


def running(job: str = "j1", attempt: int = 1) -> JobRunning:
    return JobRunning(at_ms=3_000, job=job, attempt=attempt)


def finished(
    job: str = "j1", attempt: int = 1, outcome: Outcome = Outcome.SUCCEEDED
) -> JobFinished:
    return JobFinished(at_ms=4_000, job=job, attempt=attempt, outcome=outcome, code=0, why="")


def stopping(cause: StopCause, attempt: int = 1) -> JobStopping:
    return JobStopping(at_ms=3_500, job="j1", attempt=attempt, cause=cause, why="")


def requeued(attempt: int = 1) -> JobRequeued:
    return JobRequeued(
        at_ms=3_600, job="j1", attempt=attempt, cause=StopCause.MOVE, not_before_ms=0, why=""
    )


def op(kind: str, at: float, result: str = OK, client: int = 1, **more: object) -> Op:
    return Op(client=client, kind=kind, began=at, ended=at + 0.01, result=result, **more)  # type: ignore[arg-type]


def made(at: float = 1.0, result: str = OK, job: str = "j1", key: str = "k1") -> Op:
    return op("submit", at, result, key=key, made=job if result == OK else "")


def saw(at: float, state: str, attempt: int, job: str = "j1") -> Op:
    return op("job", at, job=job, seen=(Seen(job, state, attempt),))


def member(
    began: float = 2.1, ended: float | None = 3.9, attempt: int = 1, gpu: int = 0, job: str = "j1"
) -> Launched:
    return Launched(
        job=job, attempt=attempt, member=0, node="n1", gpus=(gpu,), began=began, ended=ended
    )


LIFE = log(submitted(), placed(), running(), finished())
MOVED = log(
    submitted(), placed(), running(), stopping(StopCause.MOVE), requeued(), placed(attempt=2)
)
CANCELLED = log(
    submitted(), placed(), stopping(StopCause.CANCEL), finished(outcome=Outcome.CANCELLED)
)


def test_a_history_without_a_fault_passes() -> None:
    ops = [made(1), saw(1.5, "waiting", 0), saw(2, "waiting", 0), saw(3, "running", 1)]
    ops += [
        saw(4, "succeeded", 1),
        op("list", 5, listed=("j1",), seen=(Seen("j1", "succeeded", 1),)),
    ]
    ops += [op("events", 6, shown=tuple((one.seq, checksum(one)) for one in LIFE))]
    assert check(ops, LIFE, [member()]) == []
    moved = [made(1), saw(2, "running", 1), saw(3, "waiting", 1), saw(4, "starting", 2)]
    assert check(moved, MOVED) == []


def test_an_acknowledged_submission_that_is_gone_is_found() -> None:
    (found, *_) = check([made()], log())
    assert found == "j1 (key k1) was acknowledged, and is not in the log"


@pytest.mark.parametrize("result", [OK, UNKNOWN])
def test_a_submission_that_made_two_jobs_is_found(result: str) -> None:
    found = check([made(result=result)], log(submitted(), submitted("j2")))
    assert found == ["key k1 made j1 and j2"]


def test_two_answers_to_one_key_are_found() -> None:
    found = check([made(), made(2, job="j2")], log(submitted(), submitted("j2", "k2")))
    assert "key k1 was answered with j1 and j2" in found


def test_a_submission_without_an_answer_may_have_happened_and_a_refused_one_not() -> None:
    assert check([made(result=UNKNOWN)], log(submitted())) == []
    assert check([made(result=UNKNOWN)], log()) == []
    assert check([made(result=FAIL)], log(submitted())) == ["key k1 was refused, and made j1"]


def test_a_requeued_job_that_had_ended_counts_as_a_submission() -> None:
    again = op("requeue", 5, job="j1", key="k2", made="j2")
    assert check([made(), again], [*LIFE, Recorded(5, submitted("j2", "k2"))]) == []
    assert check([made(), again], LIFE) == [
        "j2 (key k2) was acknowledged, and is not in the log",
    ]


def test_a_cancelled_job_that_is_placed_afterwards_is_found() -> None:
    events = [one.event for one in CANCELLED]
    found = check([], log(*events, placed(attempt=2)))
    assert found == ["j1 was cancelled by 3, and placed by 5"]


def test_a_cancelled_job_that_a_node_launches_afterwards_is_found() -> None:
    assert check([], CANCELLED, [member(began=2.5)]) == []
    assert check([], CANCELLED, [member(began=4.5, ended=5)]) == [
        "j1.1.0 was launched 0.500 s after its job had ended"
    ]


def test_an_element_that_was_retried_may_start_again() -> None:
    events: list[Event] = [
        submitted("j1.0", ""),
        placed("j1.0"),
        finished("j1.0", outcome=Outcome.CANCELLED),
        ArrayRetried(at_ms=5_000, job="j1", index=None, why=""),
        submitted("j1.0", ""),
        placed("j1.0", 2),
    ]
    later = member(began=5.5, ended=None, attempt=2, job="j1.0")
    assert check([], log(*events), [later]) == []
    del events[3]
    assert "j1.0 was cancelled by 3, and placed by 5" in check([], log(*events), [later])


def test_an_acknowledged_cancellation_or_retry_that_is_gone_is_found() -> None:
    cancel, retry = op("cancel", 2, job="j1"), op("retry", 2, job="j1")
    assert check([cancel], log(submitted())) == [
        "the cancellation of j1 was acknowledged, and is not in the log"
    ]
    assert check([retry], log(submitted())) == [
        "the retry of j1 was acknowledged, and is not in the log"
    ]
    assert check([cancel], CANCELLED) == [] and check([cancel], LIFE) == []


@pytest.mark.parametrize(
    ("history", "reads"),
    [
        (LIFE, [("running", 1), ("starting", 1)]),
        (LIFE, [("succeeded", 1), ("running", 1)]),
        (LIFE, [("starting", 1), ("waiting", 0)]),
        (MOVED, [("waiting", 1), ("running", 1)]),
        (MOVED, [("starting", 2), ("waiting", 1)]),
    ],
)
def test_a_read_that_goes_back_is_found(
    history: list[Recorded], reads: list[tuple[str, int]]
) -> None:
    ops = [made(), *(saw(2 + at, *read) for at, read in enumerate(reads))]
    (found,) = check(ops, history)
    assert "after it had seen event" in found


def test_another_client_may_still_see_what_was() -> None:
    late = Op(client=2, kind="job", began=3, ended=3.1, result=OK, seen=(Seen("j1", "waiting", 0),))
    assert check([made(), saw(2, "running", 1), late], LIFE) == []


def test_a_read_that_goes_back_behind_events_or_another_job_is_found() -> None:
    history = log(submitted(), submitted("j2", "k2"), placed(), placed("j2"))
    shown = tuple((one.seq, checksum(one)) for one in history)
    assert check([op("events", 1, shown=shown), saw(2, "waiting", 0)], history)
    assert check([saw(1, "starting", 1, "j2"), saw(2, "waiting", 0)], history)
    assert check([saw(1, "starting", 1), saw(2, "waiting", 0, "j2")], history) == []


def test_a_job_that_its_client_is_told_not_to_exist_is_found() -> None:
    gone = op("job", 2, FAIL, job="j1")
    assert check([made(), gone], LIFE) == [
        "client 1 made j1, and was told later that there is none"
    ]
    assert check([made(), op("list", 2, listed=("j9",))], LIFE) == [
        "client 1 made j1, and did not find it in a list"
    ]


def test_an_event_that_was_shown_and_is_another_one_later_is_found() -> None:
    shown = op("events", 1, shown=((2, checksum(LIFE[1])),))
    assert check([shown], LIFE) == []
    assert check([shown], log(submitted())) == [
        "client 1 was shown event 2, which is missing in the log"
    ]
    assert check([shown], log(submitted(), running())) == [
        "client 1 was shown event 2, which is another one in the log"
    ]


def test_a_hole_in_the_log_is_found() -> None:
    assert check([], [LIFE[0], LIFE[2]]) == ["the log goes from event 1 to 3"]


def test_members_that_are_launched_twice_or_without_a_placement_are_found() -> None:
    twice = [member(ended=2.2), member(began=2.3)]
    assert check([], LIFE, twice) == ["j1.1.0 was launched twice"]
    (found,) = check([], LIFE, [member(attempt=2)])
    assert found == "j1.2.0 was launched on n1, and the log has no such placement"


def test_a_gpu_that_two_members_hold_at_once_is_found() -> None:
    history = log(submitted(), placed(), submitted("j2", "k2"), placed("j2"))
    first, second = member(began=2.1, ended=3.0), member(began=2.9, ended=4.0, job="j2")
    assert check([], history, [first, second]) == [
        "GPU 0 of n1 was held by j1.1.0 and j2.1.0 at once"
    ]
    assert check([], history, [first, member(began=3.0, ended=4.0, job="j2")]) == []
    assert check([], history, [first, member(began=2.9, job="j2", gpu=1)]) == []
    assert check([], history, [member(ended=None), second])


def test_an_agents_log_says_which_gpus_its_members_held(tmp_path: Path) -> None:
    (tmp_path / "agent.log").write_text(
        "2026-11-16 10:00:00,000 n1 is up as incarnation 1\n"
        "2026-11-16 10:00:01,500 j1.1.0 starts: process 7, GPUs 0,1\n"
        "something else\n"
        "2026-11-16 10:00:02,000 j2.7.1.0 starts: process 8, GPUs -\n"
        "2026-11-16 10:00:03,250 j1.1.0 ended with code -9\n"
        "\0\0\0\0"  # of a disk that broke
        "2026-11-16 10:00:09,000 n1 is up as incarnation 2\n"
        "2026-11-16 10:00:10,000 j3.1.0 starts: process 9, GPUs 1\n"
    )
    first, lost, third = launched_on(tmp_path)
    assert (first.job, first.gpus) == ("j1", (0, 1)) and first.ended == first.began + 1.75
    assert (lost.job, lost.attempt, lost.gpus) == ("j2.7", 1, ()) and lost.ended is not None
    assert third.ended is None and third.node == tmp_path.name
