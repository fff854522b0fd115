"""`shoal ls`: the files that a job has kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, flag, job_word, verb

if TYPE_CHECKING:
    from shoal.model.kept import FilesView


@verb(
    Argument("job", "JOB", "A job's id or name.", type=job_word),
    Argument("path", "[PATH]", "Only this file or folder. [all]", required=False, default=""),
    flag("--checkpoints", help="Its checkpoints that were copied to the head instead."),
)
def ls(job: str, path: str, checkpoints: bool, json: bool, home: Path) -> None:
    """List the files that a job has kept.

    These are the files that the job wrote to the folder $SHOAL_OUTPUT. They are
    copied to the head while the job runs, so they are there after its node has died.
    Files of finished jobs are removed after 30 days, or earlier if the store is full.

    Examples:
      shoal ls j7
      shoal ls j7 runs
      shoal ls j7 --json
      shoal ls j7 --checkpoints
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.model.kept import Kind

    kind = Kind.CHECKPOINT if checkpoints else Kind.OUTPUT
    with cluster.connect(home) as client:
        asked = cluster.job_id(client, job)
        view = cluster.on_job(client, asked, lambda c: c.files(asked, path, kind=kind))
        array = not view.files and client.job(asked).array is not None
    if json:
        show.as_json(view)
    elif array:
        show.note(f"{asked} is an array: its elements keep the files; name one, as {asked}.3")
    else:
        _show(view, path)


def _show(view: FilesView, path: str) -> None:
    import time

    from shoal.cli.screen.files import size_text
    from shoal.cli.screen.show import Column, note, table

    if view.files:
        columns = (Column("SIZE", right=True), Column("WRITTEN"), Column("PATH"))
        rows = [
            (
                size_text(file.size),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(file.modified_ms / 1000)),
                file.path,
            )
            for file in view.files
        ]
        table(columns, rows)
        if len(view.files) > 1:
            note(f"{len(view.files)} files, {size_text(view.total_bytes)}")
    elif path:
        note(f"{view.job} has kept no files at {path}")
    else:
        hint = "; it may still write some" if view.live else ""
        note(f"{view.job} has kept no files: it wrote none to $SHOAL_OUTPUT{hint}")
    for text in view.notes:
        note(f"not kept: {text}")
