"""Jobs that exist are stopped, run again, put to sleep or woken: cancel, requeue, retry, sleep,
wake."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, job_word, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.cli.cluster import Retry
    from shoal.client import Client
    from shoal.model.views import Done, JobView


NAMED = "Ids or names of jobs, e.g. j7 prep, or j7.3 for an element."
JOBS = Argument("jobs", "JOB...", NAMED, type=job_word, nargs=-1, required=True)


@verb(
    Argument("jobs", "JOB...", NAMED, type=job_word, nargs=-1),
    Option("--workflow", metavar="ID", help="Cancel what is left of this workflow."),
)
def cancel(jobs: tuple[str, ...], workflow: str | None, json: bool, home: Path) -> int:
    """Cancel jobs.

    Each member gets SIGTERM, and SIGKILL when its grace time is over.
    Cancelling a finished job does nothing (exit 0); an unknown id is an error
    (exit 1). Cancelling an array stops its elements, and no more are started.

    Examples:
      shoal cancel j7
      shoal cancel j7.3         one element of the array j7
      shoal cancel j7 j8 j9
      shoal cancel --workflow j7
      shoal ps --json | jq -r '.[].id' | xargs shoal cancel
    """
    from shoal.cli import cluster
    from shoal.cli.cluster import each

    if bool(jobs) == (workflow is not None):
        raise Failure("name the jobs to cancel, or a workflow with --workflow ID", USAGE)
    with cluster.connect(home) as client:
        asked = cluster.job_ids(client, jobs)
        if workflow is not None:
            flow = cluster.job_id(client, workflow, acts=True)
            return each([flow], client.cancel_workflow, "cancelled", json)
        if not json:
            cluster.print_preview(client, "cancel", asked)
        return each(asked, lambda job: _cancel(client, job), "cancelled", json)


@verb(JOBS)
def requeue(jobs: tuple[str, ...], json: bool, home: Path) -> int:
    """Stop jobs and run them again.

    A running job is stopped, waits in the queue, and continues from its last
    checkpoint. This costs none of its retries. A finished job is submitted
    again as a new job. An element of an array keeps its id; for all that failed,
    use `shoal retry`.

    Examples:
      shoal requeue j7
      shoal requeue j7.3
      shoal requeue j7 j8 --json | jq -r '.[].id'
    """
    from shoal.cli import cluster
    from shoal.cli.cluster import each

    with cluster.connect(home) as client:
        asked = cluster.job_ids(client, jobs)
        if not json:
            cluster.print_preview(client, "requeue", asked)
        return each(
            asked,
            lambda job: cluster.on_job(client, job, lambda c: c.requeue(job)),
            "will run again",
            json,
        )


@verb(JOBS)
def retry(jobs: tuple[str, ...], json: bool, home: Path) -> int:
    """Run the failed elements of arrays again.

    Every element that failed, ran out of time or was cancelled runs again, under
    its own id; the others are left alone. This also works when the array has
    ended: it comes back, and ends when the retried elements have ended.

    Examples:
      shoal retry j7            all elements of j7 that did not succeed
      shoal retry j7.3 j7.9     these two
    """
    from shoal.cli import cluster
    from shoal.cli.cluster import each

    with cluster.connect(home) as client:
        asked = cluster.job_ids(client, jobs)
        return each(
            asked,
            lambda job: cluster.on_job(client, job, lambda c: c.retry(job)),
            "will run again",
            json,
        )


def _cancel(client: Client, job: str) -> Done:
    from shoal.cli.cluster import NOT_FOUND, on_job
    from shoal.client import ShoalError
    from shoal.model.views import Done

    try:
        return client.cancel(job)
    except ShoalError as error:
        if error.status != NOT_FOUND:
            raise
    finished = on_job(client, job, lambda c: c.job(job))
    return Done(id=job, note=f"already finished: {finished.state}")


# `shoal sleep` and `shoal wake`: jobs lend their GPUs out, and go on where they stopped.


LOOK_S = 1.0
DONE = {
    ("sleep", False): "is being suspended",
    ("sleep", True): "is asleep",
    ("wake", False): "wakes as soon as there is room",
    ("wake", True): "is awake",
}
QUIET_S = 2.0  # a wait that is shorter needs no line


@verb(JOBS, flag("--wait", help="Return when they are asleep."))
def sleep(jobs: tuple[str, ...], wait: bool, json: bool, home: Path) -> int:
    """Suspend jobs and free their GPUs.

    What a job has on its GPUs moves to the memory of its nodes, and its
    processes stop. It wakes when it is used (shoal exec, attach, forward, ssh,
    or input to an open session) or with `shoal wake`, and goes on at the
    instruction where it stopped. Only a running job can be put to sleep. If
    one of its members cannot sleep, the job keeps running.

    Examples:
      shoal sleep j7
      shoal sleep --wait j7 j8
      shoal sleep j7.3          one element of the array j7
    """
    return _each(jobs, "sleep", wait, json, home)


@verb(JOBS, flag("--wait", help="Return when they are awake."))
def wake(jobs: tuple[str, ...], wait: bool, json: bool, home: Path) -> int:
    """Resume suspended jobs where they stopped.

    A job wakes on its own nodes as soon as there is room for it; `shoal why`
    says what it waits for.

    Examples:
      shoal wake j7
      shoal wake --wait j7 j8
    """
    return _each(jobs, "wake", wait, json, home)


def _each(jobs: tuple[str, ...], action: str, wait: bool, json: bool, home: Path) -> int:
    """All are asked before the first is waited for."""
    from shoal.cli import cluster
    from shoal.cli.cluster import each
    from shoal.client import ShoalError, Unreachable
    from shoal.forms.failure import Failure

    answers: dict[str, Done | ShoalError | Failure] = {}
    with cluster.connect(home) as client:
        asked = cluster.job_ids(client, jobs)
        act = client.sleep if action == "sleep" else client.wake
        for job in asked:
            try:
                answers[job] = cluster.on_job(client, job, lambda _: act(job))  # noqa: B023
            except Unreachable:
                raise
            except (ShoalError, Failure) as error:
                answers[job] = error

    with cluster.Retry(home) as again:

        def finish(job: str) -> Done:
            answer = answers[job]
            if isinstance(answer, ShoalError | Failure):
                raise answer
            return _wait(again, job, action, quiet=json) if wait else answer

        return each(asked, finish, DONE[action, wait], json)


def _wait(again: Retry, job: str, action: str, *, quiet: bool) -> Done:
    from shoal.cli.screen.show import Spinner
    from shoal.forms.failure import REFUSED, Failure
    from shoal.model.views import Done

    goal, since = ("asleep" if action == "sleep" else "running"), time.monotonic()
    with Spinner(quiet=quiet) as spinner:
        while True:
            view = again(lambda client: client.job(job, wait_for=goal, wait_s=LOOK_S))
            if view.state == goal:
                return Done(id=job)
            if view.finished_ms is not None:
                raise Failure(f"{job} has ended ({view.state}): {view.why}", REFUSED)
            if action == "sleep" and view.state in ("waking", "running"):
                why = view.why.removeprefix("goes on: ")
                raise Failure(f"{job} was not suspended and keeps running: {why}", REFUSED)
            if action == "sleep" and view.state != "dozing":
                raise Failure(f"{job} is {_phase(view)}", REFUSED)
            if time.monotonic() - since >= QUIET_S:
                spinner(f"{job} is {_phase(view)}")


def _phase(view: JobView) -> str:
    return f"{view.state}: {view.why}" if view.why else view.state
