"""One round of the whole system, from a request to its end."""

from __future__ import annotations

import copy

from shoal.core.state.events.runs import JobPlaced
from shoal.core.step import step
from shoal.model.commands import Acknowledge, Launch
from shoal.model.job import Outcome, Phase
from shoal.model.policy import Policy
from shoal.model.report import Accepted, Cancel, Refused, Report, Submit
from tests.core.build import Cluster, eventful, job_spec, kinds


def test_a_job_goes_from_submission_to_its_end_in_as_few_rounds_as_there_are_messages() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)

    job_id = cluster.submit(gpus=2)
    assert kinds(cluster.last.events) == ["JobSubmitted", "JobPlaced"]
    (launch,) = cluster.last.commands
    assert isinstance(launch, Launch)
    assert launch.gpus == (0, 1)

    cluster.deliver()
    assert kinds(cluster.hear("a").events) == ["JobRunning"]
    assert cluster.last.commands == []

    ended = cluster.end(job_id)
    assert kinds(ended.events) == ["MemberExited", "JobFinished"]
    assert [type(command) for command in ended.commands] == [Acknowledge]
    assert cluster.finished[job_id].outcome is Outcome.SUCCEEDED

    cluster.deliver()
    assert cluster.books["a"].exits == {}
    assert cluster.state.jobs == {}


def test_a_job_so_short_that_it_was_never_seen_alive_has_still_run() -> None:
    cluster = Cluster()
    cluster.join("a")
    job_id = cluster.submit()
    cluster.deliver()
    assert kinds(cluster.end(job_id).events) == ["JobRunning", "MemberExited", "JobFinished"]
    assert cluster.finished[job_id].outcome is Outcome.SUCCEEDED


def test_answers_come_one_for_each_request_and_in_order() -> None:
    cluster = Cluster()
    cluster.join("a", cpus=4)
    answers = cluster.step(
        requests=(
            Submit(job_spec(cpu_milli=1_000)),
            Submit(job_spec(cpu_milli=99_000)),
            Cancel("j7"),
            Cancel("j1"),
        )
    ).answers
    assert [type(answer) for answer in answers] == [Accepted, Refused, Refused, Accepted]
    assert cluster.finished["j1"].outcome is Outcome.CANCELLED


def test_all_events_of_a_step_carry_its_time() -> None:
    cluster = Cluster()
    cluster.join("a")
    cluster.wait(123)
    cluster.submit()
    assert {event.at_ms for event in cluster.last.events} == {cluster.now_ms}


def test_a_step_without_news_does_nothing() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.run(gpus=1)
    cluster.submit(gpus=1)
    quiet = cluster.step()
    assert (quiet.events, quiet.commands, quiet.answers, quiet.finished) == ([], [], [], [])


def test_a_step_that_places_as_many_as_it_may_asks_to_be_called_again_at_once() -> None:
    cluster = Cluster(Policy(placements_per_step_max=2))
    cluster.join("a", cpus=8)
    first = cluster.step(requests=tuple(Submit(job_spec()) for _ in range(3)))
    assert sum(isinstance(event, JobPlaced) for event in first.events) == 2
    assert first.wake_ms == cluster.now_ms
    second = cluster.step()
    assert sum(isinstance(event, JobPlaced) for event in second.events) == 1
    assert second.wake_ms != cluster.now_ms


def test_the_next_step_is_due_when_a_retry_a_limit_or_a_silence_is() -> None:
    cluster = Cluster(Policy(silent_after_ms=50_000, grace_ms=90_000))
    assert cluster.step().wake_ms is None
    cluster.join("a")
    assert cluster.last.wake_ms == cluster.now_ms + 50_000

    limited = cluster.run(time_limit_ms=30_000)
    assert cluster.last.wake_ms == cluster.now_ms + 30_000

    retried = cluster.run(restart="on-failure", retries=1, backoff_ms=10_000)
    assert cluster.end(retried, code=1).wake_ms == cluster.now_ms + 10_000

    cluster.end(limited)
    cluster.wait(10_000)
    assert cluster.step().wake_ms is not None
    assert cluster.job(retried).phase is Phase.STARTING


def test_a_silent_node_is_looked_at_again_when_its_grace_time_ends() -> None:
    cluster = Cluster(Policy(silent_after_ms=5_000, grace_ms=60_000))
    cluster.join("a")
    heard_ms = cluster.now_ms
    cluster.wait(5_000)
    assert cluster.step().wake_ms == heard_ms + 60_000


def test_nothing_happens_by_itself_before_the_next_step_is_due() -> None:
    cluster = eventful()
    wakes = 0
    while (wake_ms := cluster.step().wake_ms) is not None:
        wakes += 1
        for early_ms in (cluster.now_ms, (cluster.now_ms + wake_ms) // 2, wake_ms - 1):
            copied = copy.deepcopy(cluster.state)
            assert step(copied, Report(), cluster.policy, early_ms).events == []
        cluster.now_ms = wake_ms
    assert wakes >= 3
