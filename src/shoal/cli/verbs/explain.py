"""`shoal explain`: what happened to a job, on one page, also long after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.model.ledger import CostView


def explain(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job's id, also of a finished one.")],
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Tell what happened to a job, on one page.

    Its attempts with their nodes and times; how each ended: own error, out of
    memory, hardware, node lost, hang, time limit, preempted, cancelled; the
    last lines of the member that failed first; what was learned of its nodes;
    and what it cost by the ledger, as in shoal report --by job. A cause that
    is only likely says so, and why.

    It is told from the log of events, so it works as long as the job is known.
    Why a job waits now: shoal why.

    Examples:
      shoal explain j7
      shoal explain j7 --json | jq '.attempts[] | {cause, evidence}'
    """
    from shoal.cli import reach
    from shoal.cli.screen import show

    asked = reach.job_id(job)
    with reach.connect(home) as client:
        explanation = reach.found(client, asked, lambda c: c.explanation(asked))
        cost = _cost(client, asked)
    if json:
        import msgspec

        show.as_json({**msgspec.structs.asdict(explanation), "cost": cost})
        return
    from shoal.cli.screen.explanation import page

    for number, text in enumerate(page(explanation, cost=cost)):
        show.line(text, "bold" if not number or _is_heading(text) else "")


def _cost(client: Client, job: str) -> CostView | None:
    """None where no ledger is kept."""
    from shoal.client import ShoalError

    try:
        return client.cost(job)
    except ShoalError:
        return None


def _is_heading(text: str) -> bool:
    return text.startswith(("Attempt ", "What "))
