"""`shoal explain`: what happened to a job, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, job_word, verb

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.model.ledger import CostView


@verb(Argument("job", "JOB", "A job's id or name; it may have ended long ago.", type=job_word))
def explain(job: str, json: bool, home: Path) -> None:
    """Show what happened to a job, on one page.

    The page lists each attempt with its nodes and times, and how it ended: the
    job's own error, out of memory, hardware, node lost, hang, time limit,
    preempted or cancelled. It shows what limited the steps of a job that
    trained, the last lines of the member that failed first, what was learned
    about the nodes, and the cost from the ledger (as in `shoal report --by
    job`). If a cause is only likely, the page says so and why.

    The page is made from the log of events, so it is there as long as the job
    is known. For why a job waits now, use `shoal why`.

    Examples:
      shoal explain j7
      shoal explain j7 --json | jq '.attempts[] | {cause, evidence}'
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        asked = cluster.job_id(client, job)
        explanation = cluster.on_job(client, asked, lambda c: c.explanation(asked))
        cost = _cost(client, asked)
    if json:
        import msgspec

        show.as_json({**msgspec.structs.asdict(explanation), "cost": cost})
        return
    from shoal.cli.screen.explanation import page

    for number, text in enumerate(page(explanation, cost=cost)):
        show.line(text, "bold" if not number or _is_heading(text) else "")


def _cost(client: Client, job: str) -> CostView | None:
    """None if the cluster keeps no ledger."""
    from shoal.client import ShoalError

    try:
        return client.cost(job)
    except ShoalError:
        return None


def _is_heading(text: str) -> bool:
    return text.startswith(("Attempt ", "What "))
