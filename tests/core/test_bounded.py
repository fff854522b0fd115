"""The state holds what lives and nothing of what is over, so a step costs the same forever."""

from __future__ import annotations

from collections.abc import Sized

from shoal.core.state.state import State
from tests.core.build import Cluster


def sizes(state: State) -> dict[str, int]:
    """Of every container in the state and in its parts, whatever they are called."""
    found: dict[str, int] = {}
    for owner in (state, state.queue, state.cluster, state.accounts, state.estimates):
        for name in getattr(owner, "__slots__", None) or vars(owner):
            value = getattr(owner, name)
            if isinstance(value, Sized) and not isinstance(value, str):
                found[f"{type(owner).__name__}.{name}"] = len(value)
    found["placed members"] = sum(map(len, state.placed.values()))
    return found


def run_jobs(cluster: Cluster, count: int) -> None:
    """Jobs of many kinds come, fail, are retried, cancelled and lost, and all of them end."""
    for number in range(count):
        job_id = cluster.run(
            gpus=number % 3,
            cpu_milli=1000 + number % 500,
            time_limit_ms=60_000 if number % 2 else 0,
            restart="on-failure",
            retries=1,
            backoff_ms=0,
        )
        if number % 5 == 0:
            cluster.end(job_id, code=1)
            cluster.deliver()
            cluster.hear("a", "b")
        if number % 7 == 0:
            cluster.reboot("a")
            cluster.hear("a")
            cluster.deliver()
            cluster.hear("a", "b")
        if number % 11 == 0:
            cluster.cancel(job_id)
            cluster.deliver()
        cluster.end(job_id, code=143 if number % 11 == 0 else 0)
        cluster.deliver()
        cluster.hear("a", "b")
        cluster.wait(10)
        assert job_id in cluster.finished


def test_a_thousand_jobs_leave_nothing_behind() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=4)
    cluster.join("b", gpus=4)
    run_jobs(cluster, 100)
    before = sizes(cluster.state)
    run_jobs(cluster, 1_000)
    after = sizes(cluster.state)
    for swept_now_and_then in ("State.limits", "State.aging", "Queue.oldest"):
        assert before.pop(swept_now_and_then) <= 64 + 2
        assert after.pop(swept_now_and_then) <= 64 + 2
    assert after == before
    assert all(not book.exits and not book.stopping for book in cluster.books.values())


def test_what_cannot_fit_is_remembered_once_per_shape_and_not_per_job() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.run(gpus=1)
    for _ in range(50):
        cluster.submit(gpus=1)
    assert len(cluster.state.agenda.hopeless) == 1
    assert len(cluster.state.queue.lanes) == 1


def test_a_step_emits_no_event_about_jobs_that_only_wait() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    cluster.run(gpus=1)
    for _ in range(50):
        cluster.submit(gpus=1)
    cluster.wait(1_000)
    assert cluster.hear("a").events == []
