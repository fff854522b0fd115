"""Jobs that wait for other jobs, or for a time; and workflows, which come as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.core.answers.waits import waits_of
from shoal.core.answers.why import explain
from shoal.model.job import Outcome, Phase
from shoal.model.reason import render
from shoal.model.report import (
    Accepted,
    AddTenant,
    Answer,
    CancelWorkflow,
    Refused,
    Request,
    Submit,
    SubmitWorkflow,
    WorkflowJob,
)
from tests.core.build import Cluster, job_spec, kinds

HOUR_MS = 3_600_000


def cluster_of_one() -> Cluster:
    cluster = Cluster()
    cluster.join("n1", cpus=8)
    return cluster


def ask(cluster: Cluster, request: Request) -> Answer:
    return cluster.ask(request)


def submit(cluster: Cluster, *after: str, **fields: Any) -> str:
    return cluster.submit(after=after, **fields)


def start(cluster: Cluster) -> None:
    cluster.hear("n1")
    cluster.deliver()
    cluster.hear("n1")


def end(cluster: Cluster, job: str, code: int = 0) -> None:
    start(cluster)
    cluster.end(job, code)


def flow(*jobs: tuple[str, tuple[str, ...]]) -> tuple[WorkflowJob, ...]:
    return tuple(WorkflowJob(name, job_spec(), after) for name, after in jobs)


def why(cluster: Cluster, job: str) -> str:
    return render(explain(cluster.state, cluster.state.jobs[job], cluster.policy, cluster.now_ms))


@pytest.mark.parametrize(
    ("when", "code", "runs"),
    [
        ("", 0, True),
        ("", 3, False),
        (":ok", 3, False),
        (":any", 0, True),
        (":any", 3, True),
        (":fail", 0, False),
        (":fail", 3, True),
    ],
)
def test_a_job_starts_only_if_the_other_ended_as_it_needs(when: str, code: int, runs: bool) -> None:
    cluster = cluster_of_one()
    first = submit(cluster, name="prepare")
    second = submit(cluster, first + when)
    assert cluster.state.jobs[second].phase is Phase.WAITING
    assert f"waits for {first} (prepare) to" in why(cluster, second)
    end(cluster, first, code)
    if runs:
        assert cluster.state.jobs[second].active
    else:
        over = cluster.finished[second]
        assert over.outcome is Outcome.CANCELLED
        how = "failed: it exited 3" if code else "succeeded: every member exited 0"
        assert render(over.why).endswith(f"but {first} {how}")


@pytest.mark.parametrize(("code", "runs"), [(0, True), (1, False)])
def test_a_job_that_ended_before_is_found_in_the_store(code: int, runs: bool) -> None:
    cluster = cluster_of_one()
    first = submit(cluster)
    end(cluster, first, code)
    second = submit(cluster, first)
    assert (second in cluster.state.jobs) == runs
    assert runs or cluster.finished[second].outcome is Outcome.CANCELLED


def test_whoever_waits_for_a_cancelled_job_follows_by_the_same_rule() -> None:
    cluster = cluster_of_one()
    first = submit(cluster)
    second = submit(cluster, first)
    third = submit(cluster, second)
    report = submit(cluster, f"{third}:any")
    end(cluster, first, 1)
    assert cluster.finished[second].outcome is Outcome.CANCELLED
    assert f"{second} was cancelled" in render(cluster.finished[third].why)
    assert cluster.state.jobs[report].active


def test_a_retry_is_not_an_end() -> None:
    cluster = cluster_of_one()
    first = submit(cluster, restart="on-failure", retries=1, backoff_ms=0)
    second = submit(cluster, first)
    end(cluster, first, 1)
    assert cluster.state.jobs[second].awaits == (first,)
    end(cluster, first, 0)
    assert cluster.state.jobs[second].active


def test_all_conditions_must_hold() -> None:
    cluster = cluster_of_one()
    one, two = submit(cluster), submit(cluster)
    last = submit(cluster, one, two)
    assert "and for 1 other job" in why(cluster, last)
    assert "1 job waits for other jobs to end" in waits_of(cluster.state, cluster.policy, 0)
    end(cluster, two)
    assert cluster.state.jobs[last].awaits == (one,)
    end(cluster, one)
    assert cluster.state.jobs[last].active


def test_an_unknown_job_and_another_tenants_job_are_refused_alike() -> None:
    cluster = cluster_of_one()
    for tenant in ("red", "blue"):
        assert isinstance(ask(cluster, AddTenant(tenant)), Accepted)
    theirs = ask(cluster, Submit(job_spec(tenant="red"), scope="red"))
    assert isinstance(theirs, Accepted)
    for job in (theirs.id, "j99"):
        spec = job_spec(tenant="blue", after=(job,))
        answer = ask(cluster, Submit(spec, scope="blue"))
        assert answer == Refused("after", f"there is no job {job}; see: shoal ps -a")
    assert isinstance(ask(cluster, Submit(job_spec(after=(theirs.id,)))), Accepted)


def test_a_job_is_not_considered_before_its_time() -> None:
    cluster = cluster_of_one()
    begin_ms = 1_794_884_400_000
    cluster.now_ms = begin_ms - HOUR_MS
    job = submit(cluster, begin_ms=begin_ms)
    assert why(cluster, job) == "may begin at 2026-11-17 03:00 UTC, in 1h"
    assert cluster.last.wake_ms is not None and cluster.last.wake_ms <= begin_ms
    cluster.wait(HOUR_MS - 1)
    cluster.hear("n1")
    assert cluster.state.jobs[job].phase is Phase.WAITING
    cluster.wait(1)
    cluster.step()
    assert cluster.state.jobs[job].active


def test_a_begin_in_the_past_delays_nothing() -> None:
    cluster = cluster_of_one()
    assert cluster.state.jobs[submit(cluster, begin_ms=1)].active


def test_a_job_that_waited_for_others_is_not_called_old() -> None:
    cluster = cluster_of_one()
    first = submit(cluster)
    start(cluster)
    second = submit(cluster, first)
    cluster.wait(HOUR_MS)
    cluster.end(first)
    assert "started at once" in cluster.state.jobs[second].why


# -- workflows -----------------------------------------------------------------------------


def test_a_workflow_branches_by_how_its_jobs_end() -> None:
    cluster = cluster_of_one()
    jobs = flow(
        ("publish", ("big", "small")),
        ("prepare", ()),
        ("big", ("prepare",)),
        ("small", ("prepare",)),
        ("report", ("big:any", "small:any")),
    )
    answer = ask(cluster, SubmitWorkflow(jobs, "once"))
    assert isinstance(answer, Accepted)
    publish, prepare, big, small, report = (f"j{number}" for number in range(1, 6))
    assert answer.id == publish
    assert {job.spec.workflow for job in cluster.state.jobs.values()} == {publish}
    end(cluster, prepare)
    end(cluster, big)
    assert cluster.state.jobs[publish].awaits == (small,)
    end(cluster, small, 1)
    assert cluster.finished[publish].outcome is Outcome.CANCELLED
    assert cluster.state.jobs[report].active
    cluster.step(requests=(SubmitWorkflow(jobs, "once"),))
    assert "JobSubmitted" not in kinds(cluster.last.events)


@pytest.mark.parametrize(
    ("jobs", "field", "message"),
    [
        (
            flow(("a", ("b",)), ("b", ("a",))),
            "a.after",
            "the jobs wait for each other: a -> b -> a",
        ),
        (flow(("a", ("a",))), "a.after", "the jobs wait for each other: a -> a"),
        (flow(("a", ()), ("a", ())), "jobs", "two jobs have the name a"),
        (flow(("a", ("b",))), "a.after", "there is no job 'b' in this workflow"),
        (flow(("a", ()), ("b", ("a:never",))), "b.after", "'a:never' says nothing"),
        (flow(("j7", ())), "jobs", "j7 looks like a job's id; choose another name"),
        ((), "jobs", "a workflow has 1 to 1,000 jobs, not 0"),
        (
            (WorkflowJob("a", job_spec()), WorkflowJob("b", job_spec(gpus=9))),
            "b.gpus",
            "no node has more than 0",
        ),
        (
            (WorkflowJob("a", job_spec()), WorkflowJob("b", job_spec(after=("j9",)))),
            "b.after",
            "there is no job j9",
        ),
    ],
)
def test_a_workflow_is_refused_as_a_whole(
    jobs: tuple[WorkflowJob, ...], field: str, message: str
) -> None:
    cluster = cluster_of_one()
    answer = ask(cluster, SubmitWorkflow(jobs))
    assert isinstance(answer, Refused)
    assert answer.field == field
    assert message in answer.message
    assert not cluster.state.jobs


def test_a_workflow_is_cancelled_as_a_whole() -> None:
    cluster = cluster_of_one()
    ask(cluster, SubmitWorkflow(flow(("a", ()), ("b", ("a",)), ("c", ("b:any",)))))
    other = submit(cluster)
    start(cluster)
    answer = ask(cluster, CancelWorkflow("j1", "anna"))
    assert answer == Accepted("j1", "3 jobs cancelled")
    assert set(cluster.finished) == {"j2", "j3"}
    assert "cancelled with its workflow by anna" in cluster.finished["j3"].why
    assert cluster.state.jobs["j1"].phase is Phase.STOPPING
    assert cluster.state.jobs[other].active


@pytest.mark.parametrize("field", ["workflow", "schedule"])
def test_what_shoal_sets_itself_cannot_be_asked_for(field: str) -> None:
    answer = ask(cluster_of_one(), Submit(job_spec(**{field: "j1"})))
    assert isinstance(answer, Refused)
    assert answer.field == field
