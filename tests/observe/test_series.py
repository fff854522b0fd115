"""Curves of real jobs and nodes, and what of them survives a killed controller."""

from __future__ import annotations

import pytest
from harness.waiting import until

from shoal.client import ShoalError
from tests.observe.conftest import Observed


def test_a_gangs_curve_is_there_while_it_runs_and_after_it_ended(observed: Observed) -> None:
    client = observed.client
    job = observed.train(60, members=2, pace_s=0.1, SLOW="1")
    until(lambda: len(client.job_series(job).points) >= 2)
    assert observed.wait(job) == "succeeded"
    series = client.job_series(job)
    steps = [point.step for point in series.points]
    assert steps == sorted(steps)
    # A member's last beat may not have been told when it ended; the one a second before was.
    assert 40 <= steps[-1] <= 60
    assert series.points[-1].loss == pytest.approx(10 / steps[-1], rel=0.2)  # of either member
    assert all(80 < (point.step_ms or 0) < 120 for point in series.points)
    first, second = series.members
    assert {first.attempt, second.attempt} == {1}
    waited = [share for share in first.wait_share if share is not None]
    assert waited and all(0.5 < share < 0.7 for share in waited)
    assert all(share in (None, 0.0) for share in second.wait_share)
    assert [metric.name for metric in series.metrics] == ["lr"]


def test_a_killed_controller_takes_no_curve_with_it(observed: Observed) -> None:
    client = observed.client
    job = observed.train(100_000)
    seen = client.job_series
    until(lambda: len(seen(job).points) >= 8)
    before = seen(job).points
    node = client.job(job).nodes[0]
    observed.kill_controller()
    # What was not handed over yet is lost: a look or two, which is some seconds at most.
    until(lambda: len(seen(job).points) > len(before))
    after = seen(job).points
    assert before[0] in after
    assert len([point for point in before if point in after]) >= len(before) - 6
    until(lambda: len(client.node_series(node).at_ms) >= 2)
    load = client.node_series(node)
    assert all(0 <= (share or 0) <= 1 for share in (*load.cpu, *load.memory))
    assert any(share for share in load.memory)
    client.cancel(job)
    observed.wait(job)
    until(lambda: len(seen(job).points) >= len(after))


def test_only_what_is_new_is_told_to_who_knows_the_rest(observed: Observed) -> None:
    client = observed.client
    job = observed.train(60)
    assert observed.wait(job) == "succeeded"
    whole = client.job_series(job)
    assert len(whole.points) >= 2
    some = client.job_series(job, since_ms=whole.points[0].at_ms)
    assert some.points[: len(whole.points) - 1] == whole.points[1:]
    assert client.job_series(job, since_ms=2**53 - 1).points == []


def test_a_job_that_tells_no_steps_has_no_curve(observed: Observed) -> None:
    job = observed.run("true")
    observed.wait(job)
    series = observed.client.job_series(job)
    assert (series.points, series.members, series.metrics) == ([], [], [])


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda c: c.job_series("j999999"), "no job 'j999999'; see: shoal ps -a"),
        (lambda c: c.job_series("../../etc"), "Not Found"),
        (lambda c: c.node_series("nope"), "no node 'nope'; see: shoal nodes"),
        (lambda c: c.service_series("nope"), "no service 'nope'; see: shoal services"),
        (lambda c: c.node_series("n1", since_ms=-1), "since_ms"),
        (lambda c: c.node_series("n1", since_ms=2**60), "since_ms"),
    ],
)
def test_wrong_questions_are_answered_with_one_line(
    observed: Observed, ask: object, message: str
) -> None:
    with pytest.raises(ShoalError) as caught:
        ask(observed.client)  # type: ignore[operator]
    assert message in str(caught.value) or caught.value.field == message
