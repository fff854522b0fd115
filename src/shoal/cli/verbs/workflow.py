"""`shoal workflow`: the jobs of a workflow, what they wait for, and how they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, verb

if TYPE_CHECKING:
    from shoal.model.workflow import WorkflowView

WHEN_WORDS = {"ok": "", "any": " (any end)", "fail": " (failed)"}


@verb(Argument("workflow", "ID", "The id of the workflow: that of its first job, e.g. j7."))
def workflow(workflow: str, json: bool, home: Path) -> None:
    """Show the jobs of a workflow as a graph.

    A workflow is a file of named jobs that wait for each other. `shoal run`
    submits all of them or none. Its id is the id of its first job.

    Examples:
      shoal workflow j7             after: shoal run flow.yaml
      shoal workflow j7 --json | jq '.nodes[] | {name, state}'
      shoal cancel --workflow j7
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        view = client.workflow(cluster.job_id(client, workflow))
    if json:
        show.as_json(view)
        return
    print_workflow(view)


def print_workflow(view: WorkflowView) -> None:
    """Indented by how many jobs come before, and in that order."""
    from shoal.cli.screen import show

    names = {node.id: node.name for node in view.nodes}
    before: dict[str, list[str]] = {node.id: [] for node in view.nodes}
    words: dict[str, list[str]] = {node.id: [] for node in view.nodes}
    for edge in view.edges:
        if edge.before in names:
            before[edge.after].append(edge.before)
        name = names.get(edge.before, edge.before)
        words[edge.after].append(f"{name}{WHEN_WORDS.get(edge.when, '')}")
    depths = depths_of(before)
    rows: list[list[str | show.Cell]] = [
        [
            f"{'  ' * depths[node.id]}{node.name}",
            show.Cell(node.id, "bold"),
            show.state_cell(node.state),
            ", ".join(words[node.id]),
            node.why,
        ]
        for node in sorted(view.nodes, key=lambda node: depths[node.id])
    ]
    columns = [
        show.Column("JOB", firm=True),
        show.Column("ID", firm=True),
        show.Column("STATE", firm=True),
        show.Column("AFTER"),
        show.Column("WHY", wraps=True),
    ]
    show.table(columns, rows)


def depths_of(before: dict[str, list[str]]) -> dict[str, int]:
    """How many jobs come before each one, along the longest way; there is no circle."""
    depths: dict[str, int] = {}
    left = dict(before)
    while left:
        ready = [job for job, first in left.items() if all(one in depths for one in first)]
        for job in ready or list(left):
            depths[job] = 1 + max((depths.get(one, 0) for one in left[job]), default=-1)
            del left[job]
    return depths
