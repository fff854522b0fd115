"""`shoal cp`: files of a job, on this machine."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import Argument, flag, verb


@verb(
    Argument("source", "JOB:PATH", "A file or folder that the job has kept; JOB: is all of it."),
    Argument("target", "LOCAL", "Where to put it on this machine."),
    flag("--recursive", "-r", help="Copy a folder with everything in it."),
    flag("--checkpoints", help="From the job's checkpoints that were copied to the head."),
)
def cp(
    source: str, target: str, recursive: bool, checkpoints: bool, json: bool, home: Path
) -> None:
    """Copy files that a job has kept to this machine.

    Paths are those of `shoal ls`, relative to the job's $SHOAL_OUTPUT. A file has its
    name here only when it is whole. If the copy is interrupted, the same command
    continues it.

    Examples:
      shoal cp j7:model.pt .
      shoal cp j7:model.pt best.pt
      shoal cp -r j7:runs results/
      shoal cp -r j7: results/
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.cli.screen.files import Fetch, remote, size_text
    from shoal.model.kept import Kind

    job, path = remote(source)
    kind = Kind.CHECKPOINT if checkpoints else Kind.OUTPUT
    with cluster.Retry(home) as retry, show.Spinner(quiet=json) as spinner:
        view = retry(
            lambda client: cluster.on_job(client, job, lambda c: c.files(job, path, kind=kind))
        )
        fetch = Fetch(retry, job, kind, spinner)
        made = fetch.all(view, path, Path(target), recursive=recursive)
    if json:
        show.as_json({"job": job, "files": made.files, "bytes": made.size, "to": str(made.place)})
    else:
        what = "1 file" if made.files == 1 else f"{made.files} files"
        show.line(f"{what}, {size_text(made.size)}: {made.place}", "green")
