"""`shoal cancel`, `shoal requeue` and `shoal retry`: stop jobs for good, or run them again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, job_word, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.model.views import Done


NAMED = "Ids or names of jobs, e.g. j7 prep, or j7.3 for an element."
JOBS = Argument("jobs", "JOB...", NAMED, type=job_word, nargs=-1, required=True)


@verb(
    Argument("jobs", "JOB...", NAMED, type=job_word, nargs=-1),
    Option("--workflow", metavar="ID", help="Cancel what is left of this workflow."),
)
def cancel(jobs: tuple[str, ...], workflow: str | None, json: bool, home: Path) -> int:
    """Stop jobs for good.

    Each member gets SIGTERM, and SIGKILL when its grace time is over.
    Cancelling a finished job does nothing (exit 0); an unknown id is an error
    (exit 1). Cancelling an array stops its elements, and none begins any more.

    Examples:
      shoal cancel j7
      shoal cancel j7.3         one element of the array j7
      shoal cancel j7 j8 j9
      shoal cancel --workflow j7
      shoal ps --json | jq -r '.[].id' | xargs shoal cancel
    """
    from shoal.cli import cluster
    from shoal.cli.each import each

    if bool(jobs) == (workflow is not None):
        raise Failure("name the jobs to cancel, or a workflow with --workflow ID", USAGE)
    with cluster.connect(home) as client:
        asked = cluster.job_ids(client, jobs)
        if workflow is not None:
            flow = cluster.job_id(client, workflow, acts=True)
            return each([flow], client.cancel_workflow, "cancelled", json)
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
    from shoal.cli.each import each

    with cluster.connect(home) as client:
        asked = cluster.job_ids(client, jobs)
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
    from shoal.cli.each import each

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
