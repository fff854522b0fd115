"""`shoal cp`: files of a job to this machine, and files of this machine into a running job."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import Argument, flag, verb


@verb(
    Argument("source", "SOURCE", "JOB:PATH, or a file of this machine."),
    Argument("target", "TARGET", "A place on this machine, or JOB:PATH."),
    flag("--recursive", "-r", help="Copy a folder with everything in it."),
    flag("--checkpoints", help="From the job's checkpoints that were copied to the head."),
)
def cp(
    source: str, target: str, recursive: bool, checkpoints: bool, json: bool, home: Path
) -> None:
    """Copy files from or to a job.

    From a job: files that it has kept. Paths are those of `shoal ls`, relative to
    the job's $SHOAL_OUTPUT. A file has its name here only when it is whole. If the
    copy is interrupted, the same command continues it.

    To a job, which must be running: paths are relative to its working directory,
    and files belong to the job's user. JOB.MEMBER names a member of a gang.

    Examples:
      shoal cp j7:model.pt .
      shoal cp -r j7:runs results/
      shoal cp -r j7: results/
      shoal cp config.yaml j7:
      shoal cp -r data j7:/scratch/data
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.cli.screen.files import Fetch, is_remote, remote, send, size_text
    from shoal.forms.failure import USAGE, Failure
    from shoal.model.kept import Kind

    if is_remote(target):
        if is_remote(source) or checkpoints:
            raise Failure("SOURCE: must be a file of this machine if the target is a job", USAGE)
        with cluster.connect(home) as client, show.Spinner(quiet=json) as spinner:
            made = send(client, Path(source), target, spinner, recursive=recursive)
    else:
        word, path = remote(source)
        kind = Kind.CHECKPOINT if checkpoints else Kind.OUTPUT
        with cluster.Retry(home) as retry, show.Spinner(quiet=json) as spinner:
            job = retry(lambda client: cluster.job_id(client, word))
            view = retry(
                lambda client: cluster.on_job(client, job, lambda c: c.files(job, path, kind=kind))
            )
            fetch = Fetch(retry, job, kind, spinner)
            made = fetch.all(
                view, path, Path(target), recursive=recursive, folder=target.endswith("/")
            )
    if json:
        show.as_json({"files": made.files, "bytes": made.size, "to": str(made.place)})
    else:
        what = "1 file" if made.files == 1 else f"{made.files} files"
        show.line(f"{what}, {size_text(made.size)}: {made.place}", "green")
