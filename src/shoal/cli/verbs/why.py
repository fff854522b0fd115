"""`shoal why`: why a job or service is in its present state, and its history."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, job_word, verb

if TYPE_CHECKING:
    from shoal.model.views import WhyView


@verb(Argument("job", "JOB", "A job's id or name, or a service's.", type=job_word))
def why(job: str, json: bool, home: Path) -> None:
    """Show why a job or service is in its present state.

    The first lines describe this moment: what a waiting job waits for, and when
    it will probably start, or what limits the steps of a job that trains:
    compute, network, storage, input, or members that differ. Below is the
    history, oldest first. The scheduler stores the reason of every decision.

    Examples:
      shoal why j7
      shoal why j7 --json | jq -r .why
      shoal why j7 --json | jq .progress.bound.shares
      shoal why chat
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        if cluster.is_service(client, job):
            from shoal.cli.verbs.services import show_service

            show_service(job.strip(), home, json)
            return
        asked = cluster.job_id(client, job, what="job or service")
        view = cluster.on_job(client, asked, lambda c: c.why(asked))
    if json:
        show.as_json(view)
    else:
        _print(view, int(time.time() * 1000))


def _print(view: WhyView, now_ms: int) -> None:
    from shoal.cli.screen.annotations import annotation_lines
    from shoal.cli.screen.show import STATE_STYLES, Cell, Column, line, table
    from shoal.cli.screen.words import bound_lines, progress_text, state_text
    from shoal.forms.units import duration_text

    line(f"{view.id} {state_text(view.state)}", STATE_STYLES.get(view.state, "") + " bold")
    if view.why:
        line(f"  {view.why}")
    if view.progress is not None:
        line(f"  {progress_text(view.progress)}")
        for text in bound_lines(view.progress.bound):
            line(f"  {text}")
    if view.start:
        line(f"  {view.start}")
    for text in annotation_lines(view.labels, view.notes):
        line(f"  {text}", "dim")
    if not view.events:
        return
    line("")
    rows: list[list[str | Cell]] = [
        [Cell(f"{duration_text(now_ms - record.event.at_ms)} ago", "dim"), record.event.sentence()]
        for record in view.events
    ]
    table([Column("WHEN", right=True), Column("WHAT", wraps=True)], rows)
