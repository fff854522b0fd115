"""Jobs that are submitted together: one step, and an answer for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.api.http import Connection
from shoal.api.quotas import TICKET, TOKEN, Ask, Book, Ticket, charge
from shoal.core.state.events.queue import JobSubmitted
from shoal.model.views import SUBMISSIONS_MAX, JobView, Submitted
from tests.api.server import OPERATORS, Server, serving

JOB = {"command": ["true"], "gpus": 1}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "home") as made:
        yield made


def submit(server: Server, token: str, *specs: Any, key: str = "") -> list[Submitted]:
    reply = server.call(token, "POST", "/v1/submissions", {"specs": specs, "key": key})
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body, type=list[Submitted])


def test_many_jobs_are_one_step_and_each_has_its_answer(server: Server) -> None:
    server.tenant("red")
    member = server.token("ann", "red")
    commits: list[int] = []
    stored = server.loop.tick.commit

    def commit() -> None:
        decision = server.loop.tick._decision
        events = decision.step.events if decision is not None else []
        commits.append(sum(isinstance(event, JobSubmitted) for event in events))
        stored()

    server.loop.tick.commit = commit  # type: ignore[method-assign]
    answers = submit(
        server,
        member,
        JOB,
        {**JOB, "tenant": "blue"},
        {**JOB, "gpus": 99},
        {**JOB, "package": "0" * 64},
        *[JOB] * 50,
    )
    assert [one.status for one in answers[:4]] == [201, 403, 422, 422]
    problems = [one.problem for one in answers[1:4]]
    assert [problem and problem.field for problem in problems] == ["tenant", "gpus", "package"]
    jobs = [one.id for one in answers if one.id]
    assert len(set(jobs)) == len(jobs) == 51
    assert [count for count in commits if count] == [51]
    assert server.call(member, "GET", f"/v1/jobs/{jobs[-1]}").status == 200
    (line,) = [
        one
        for one in msgspec.json.decode(server.call(OPERATORS, "GET", "/v1/audit").body)["entries"]
        if one["verb"] == "jobs.submit_many"
    ]
    assert line["who"] == "ann" and line["on"] == f"{jobs[0]} and 50 more"


def test_the_same_key_returns_the_same_jobs(server: Server) -> None:
    first = submit(server, OPERATORS, JOB, {**JOB, "gpus": 99}, JOB, key="k")
    again = submit(server, OPERATORS, JOB, {**JOB, "gpus": 99}, JOB, key="k")
    assert [one.id for one in first] == [one.id for one in again]
    assert [one.id for one in submit(server, OPERATORS, JOB)] != [first[0].id]


def test_their_number_is_bounded(server: Server) -> None:
    body = {"specs": [JOB] * (SUBMISSIONS_MAX + 1)}
    reply = server.call(OPERATORS, "POST", "/v1/submissions", body)
    assert (reply.status, reply.message) == (400, "Expected `array` of length <= 1000")
    assert submit(server, OPERATORS) == []


def test_they_count_as_that_many_requests() -> None:
    ticket, book = Ticket(), Book("ann", TOKEN, 0)
    book.take(Ask())
    ticket.books = [book]
    charge(Connection({TICKET: ticket}), 1_499)
    assert book.problem(Ask(), 0) == ("sends more than 200 requests a second", 3)
    assert book.problem(Ask(), 3) is None


def test_the_answer_to_a_submission_does_not_explain_why_the_job_waits(server: Server) -> None:
    submit(server, OPERATORS, {**JOB, "gpus": 4})
    reply = server.call(OPERATORS, "POST", "/v1/jobs", {"spec": JOB})
    view = msgspec.json.decode(reply.body, type=JobView)
    assert (view.state, view.why) == ("waiting", "")
    reply = server.call(OPERATORS, "GET", f"/v1/jobs/{view.id}")
    assert msgspec.json.decode(reply.body, type=JobView).why
