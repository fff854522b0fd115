"""`shoal run`: a command, or a gang of them, becomes a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption

if TYPE_CHECKING:
    from shoal.model.views import JobView

SECOND_INTERRUPT_S = 2.0


def run(
    words: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="What to run, or one job file."),
    ],
    members: Annotated[
        int | None,
        typer.Option("--members", "-n", metavar="N", help="Processes that start together. [1]"),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", "-g", metavar="G", help="GPUs of each member. [0]")
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option("--cpus", metavar="C", help="CPUs of each member, e.g. 4 or 0.5. [1]"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="Memory of each member, e.g. 512M, 4G."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="A name for people.")
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option("--priority", metavar="P", help="Higher goes first, -1000 to 1000. [0]"),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="K=V", help="A variable; K alone copies it from here."),
    ] = None,
    workdir: Annotated[
        str | None,
        typer.Option("--workdir", metavar="DIR", help="Where to run. [the current directory]"),
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(
            "--restart",
            metavar="WHEN",
            help="never, on-failure, or only [on-node-loss].",
        ),
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option("--retries", metavar="N", help="May fail so often; implies on-failure."),
    ] = None,
    backoff: Annotated[
        str | None,
        typer.Option("--backoff", metavar="TIME", help="Before the first retry; doubles. [1s]"),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option("--time-limit", metavar="TIME", help="Stop it then: 90s, 10m, 2h, 1d."),
    ] = None,
    stop_grace: Annotated[
        str | None,
        typer.Option("--stop-grace", metavar="TIME", help="From SIGTERM to SIGKILL. [10s]"),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show its output; end with its exit code.")
    ] = False,
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Run a command, or a gang of them, on the cluster.

    Members of a gang start together or not at all. Each finds its rank and
    the others in its environment, as torchrun sets it. PATH, VIRTUAL_ENV,
    CONDA_PREFIX, PYTHONPATH and LANG go along, so that `python` means the
    same there as here.

    Instead of a command, a file ending in .yaml, .toml or .json may describe
    the job. Its fields are named as the flags (command, members, gpus, ...,
    time_limit); flags override them; a relative workdir in it is meant from
    the file's folder.

    It prints the job's id and returns at once. With --wait it shows the
    output and ends with the job's exit code (124: out of time, 130:
    cancelled). Ctrl-C then only stops the watching, with exit code 130; once
    more within 2 s cancels the job. With --wait --json the output is not
    shown, and the job is printed when it is over.

    Examples:
      shoal run -- python train.py --lr 3e-4
      shoal run -n 2 -g 8 --name big -- python train.py
      shoal run --wait --time-limit 10m --retries 3 -- ./flaky.sh
      shoal run job.yaml -g 4
      id=$(shoal run -- make test); shoal logs -f $id
    """
    from shoal.cli.request import Flags, build

    spec = build(
        words,
        Flags(
            members=members,
            gpus=gpus,
            cpus=cpus,
            memory=memory,
            name=name,
            priority=priority,
            workdir=workdir,
            restart=restart,
            retries=retries,
            backoff=backoff,
            time_limit=time_limit,
            stop_grace=stop_grace,
        ),
        env or [],
    )
    from shoal.cli import reach, show

    with reach.connect(home) as client:
        view = client.submit(spec)
    if wait:
        raise typer.Exit(_wait(view, home, json))
    if json:
        show.as_json(view)
    else:
        _print_submitted(view)


def _print_submitted(view: JobView) -> None:
    from shoal.cli.show import at_terminal, line
    from shoal.cli.words import shape_text

    if not at_terminal():
        print(view.id)
        return
    line(f"{view.id} submitted: {shape_text(view.spec)}", "bold")
    line(f"watch it with: shoal logs -f {view.id}", "dim")


def _wait(view: JobView, home: Path, json: bool) -> int:
    """Its exit code, when it is over."""
    from shoal.cli import show
    from shoal.cli.follow import follow, wait_for_end
    from shoal.cli.logs import make_output
    from shoal.cli.reach import Steady
    from shoal.cli.words import shape_text, state_text

    if not json:
        show.note(f"[{view.id} submitted: {shape_text(view.spec)}]")
    try:
        with Steady(home) as steady:
            if json:
                end = wait_for_end(steady, view.id)
                show.as_json(end)
            else:
                members = list(range(view.members))
                out = make_output(prefixed=view.members > 1, json=False)
                end = follow(steady, view.id, members, out, from_attempt=1)
    except KeyboardInterrupt:
        return _detach(view.id, home)
    if end.state != "succeeded" and not json:
        because = f": {end.why}" if end.why else ""
        show.note(f"[{end.id} {state_text(end.state)}{because}]")
    return exit_code(end)


def _detach(job: str, home: Path) -> int:
    """Once is for the watching, twice is for the job."""
    import sys
    import time

    from shoal.cli import reach, show
    from shoal.cli.guard import INTERRUPTED

    try:
        if sys.stderr.isatty():
            show.note("")  # leave the ^C that the terminal shows alone on its line
        show.note(f"[{job} goes on; come back with: shoal logs -f {job} (Ctrl-C again cancels it)]")
        time.sleep(SECOND_INTERRUPT_S)
    except KeyboardInterrupt:
        with reach.connect(home) as client:
            done = client.cancel(job)
        show.note(f"[{job}: {done.note}]" if done.note else f"[{job} cancelled]")
    return INTERRUPTED


def exit_code(view: JobView) -> int:
    """What a shell can be given: the job's code, and never 0 for a job that did not succeed."""
    code = view.code if view.code is not None else 1
    if view.state == "succeeded":
        return 0
    return code if 0 < code < 256 else 1
