"""`shoal dev`: a notebook on the cluster, in your browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.command import Argument, Option, flag, flags_of, verb
from shoal.forms.fields import JOB

if TYPE_CHECKING:
    from shoal.model.job import JobSpec
    from shoal.model.views import JobView

ACTIONS = ("start", "open", "list", "stop")
# What else of a job applies to one process that someone works in.
FIELDS = (
    *("name", "gpus", "gpu_memory", "gpu_model", "cpus", "memory", "where", "tolerates", "tenant"),
    *("priority", "time_limit", "env", "secret", "image", "workdir", "requirements", "pack"),
)
LOOK_S = 3.0


@verb(
    Argument("action", "[start|open|list|stop]", "What to do. [start]", required=False),
    Argument("which", "[NAME]", "Which one: its name or job id.", required=False),
    Option("--editor", metavar="EDITOR", help="jupyter or code. [jupyter]", default="jupyter"),
    Option("--idle", metavar="TIME", help="End it when unused for this long; 0: never. [2h]"),
    Option("--port", metavar="P", help="The port on this machine. [any that is free]"),
    flag("--no-browser", help="Only print the link."),
    *flags_of({name: JOB[name] for name in FIELDS}),
)
def dev(
    action: str | None,
    which: str | None,
    editor: str,
    idle: str | None,
    port: str | None,
    no_browser: bool,
    json: bool,
    home: Path,
    **flags: Any,
) -> int:
    """Open a notebook or editor on the cluster, in your browser.

    Starts JupyterLab as a job, prints a link to it and opens the link. JupyterLab
    is the one of your own environment: install it there (pip install jupyterlab),
    in the image, or name it in the requirements file. The connection goes through
    the head, so nothing but the API has to be reachable. Ctrl-C ends the
    connection, not the job: shoal dev open connects again.

    The folder is the one you are in. Where nodes are other machines it is sent
    there, and files that change come back while you are connected and when you
    connect again. A file that you changed here as well is not replaced.

    It ends when nobody has used it for two hours (--idle): no cell ran, no program
    ran in a terminal, and no file was written. That a page is open does not count.

    Examples:
      shoal dev -g 1
      shoal dev -g 1 --image pytorch/pytorch --idle 30m
      shoal dev --editor code --name web
      shoal dev list
      shoal dev open
      shoal dev stop dev
    """
    from shoal.cli.dev import connection
    from shoal.forms import units
    from shoal.forms.failure import USAGE, Failure

    wanted = action or "start"
    if wanted not in ACTIONS:
        message = f"unknown command 'shoal dev {units.quoted(wanted)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(ACTIONS)}", USAGE)
    if wanted == "list":
        return _list(home, json)
    if wanted == "stop":
        return _stop(which, home, json)
    local = _port(port)
    if wanted == "open":
        return connection.open_(which, home, local, browser=not no_browser, json=json)
    if which is not None:
        raise Failure(
            f"NAME: to name it, write: shoal dev --name {units.quoted(which)[1:-1]}", USAGE
        )
    job = _start(flags, editor, idle, home, quiet=json)
    return connection.connect(job, home, local, browser=not no_browser, json=json)


def _port(text: str | None) -> int:
    from shoal.cli.verbs.inside import read_ports

    return read_ports(text)[0] if text else 0


def _start(
    flags: dict[str, Any], editor: str, idle: str | None, home: Path, *, quiet: bool
) -> JobView:
    import msgspec

    from shoal.cli import cluster
    from shoal.cli.dev import connection
    from shoal.cli.request import assemble
    from shoal.cli.screen import show
    from shoal.forms import readers, request
    from shoal.forms.failure import REFUSED, USAGE, BadField, Failure
    from shoal.forms.pack import packed
    from shoal.link.packing import PackError
    from shoal.model.job import Restart

    try:
        idle_ms = 0 if idle == "0" else readers.time("30m, 2h or 0")("--idle", idle or "2h")
    except BadField as error:
        raise Failure(str(error), USAGE) from None
    asked = assemble(request.JOB, connection.command(editor, idle_ms / 1000), flags)
    spec: JobSpec = msgspec.structs.replace(asked.spec, restart=Restart.NEVER)
    with cluster.connect(home) as client:
        if spec.name is None:
            spec = msgspec.structs.replace(spec, name=connection.free_name(client))
        elif any(row.name == spec.name for row in connection.listing(client)):
            raise Failure(
                f"--name: {spec.name} is there already; connect to it with: shoal dev open "
                f"{spec.name}",
                REFUSED,
            )
        try:
            before = connection.remember(Path(spec.workdir))
        except PackError:
            before = None  # then it cannot be sent either, and that says why
        spec = packed(client, spec, asked.pack, None if quiet else show.note)
        job = client.submit(spec)
    if spec.package and before is not None:
        before.job, before.submitted_ms = job.id, job.submitted_ms
        connection.save(before)
    if not quiet:
        show.note(f"{spec.name} is {job.id}")
    return job


def _list(home: Path, json: bool) -> int:
    from shoal.cli import cluster
    from shoal.cli.dev import connection
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        rows = connection.listing(client)
    if json:
        show.as_json(rows)
        return 0
    if not rows:
        show.line("no dev environment; start one with: shoal dev")
        return 0
    titles = ("NAME", "JOB", "STATE", "NODE")
    columns = [*(show.Column(title, rank=1) for title in titles), show.Column("WHY", wraps=True)]
    table = [[row.name, row.id, row.state, ", ".join(row.nodes), row.why] for row in rows]
    show.table(columns, table)
    return 0


def _stop(name: str | None, home: Path, json: bool) -> int:
    from shoal.cli import cluster
    from shoal.cli.dev import connection
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        row = connection.find(client, name)
        done = client.cancel(row.id)
    connection.last_files(row.id, home)
    if json:
        show.as_json(done)
    else:
        show.line(f"{row.name or row.id} is stopped", "green")
    return 0
