"""`shoal cancel` and `shoal requeue`: stopping jobs, for good or to run again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.model.views import Done


def cancel(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Job ids, e.g. j7 j8.")],
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Stop jobs for good.

    Members get SIGTERM, and SIGKILL when their grace time is over. A job that
    is already over stays as it is, and that is no error; one that never was
    is (exit code 1).

    Examples:
      shoal cancel j7
      shoal cancel j7 j8 j9
      shoal ps --json | jq -r '.[].id' | xargs shoal cancel
    """
    from shoal.cli import reach
    from shoal.cli.screen.several import each

    asked = list(dict.fromkeys(reach.job_id(text) for text in jobs))
    with reach.connect(home) as client:
        each(asked, lambda job: _cancel(client, job), "cancelled", json)


def requeue(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Job ids, e.g. j7 j8.")],
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Stop jobs and let them run again.

    A job is stopped, waits its turn and goes on from its last checkpoint; this
    costs none of its retries. One that has ended is submitted again, as a new
    job.

    Examples:
      shoal requeue j7
      shoal requeue j7 j8 --json | jq -r '.[].id'
    """
    from shoal.cli import reach
    from shoal.cli.screen.several import each

    asked = list(dict.fromkeys(reach.job_id(text) for text in jobs))
    with reach.connect(home) as client:
        each(
            asked,
            lambda job: reach.found(client, job, lambda c: c.requeue(job)),
            "will run again",
            json,
        )


def _cancel(client: Client, job: str) -> Done:
    from shoal.cli.reach import NOT_FOUND, found
    from shoal.client import ShoalError
    from shoal.model.views import Done

    try:
        return client.cancel(job)
    except ShoalError as error:
        if error.status != NOT_FOUND:
            raise
    over = found(client, job, lambda c: c.job(job))
    return Done(id=job, note=f"it was already over: {over.state}")
