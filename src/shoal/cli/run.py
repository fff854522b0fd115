"""`shoal run`: a command, or a gang of them, becomes a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption

if TYPE_CHECKING:
    from shoal.model.views import JobView

SECOND_INTERRUPT_S = 2.0

# The headings of the help page.
MEMBERS = "What it is"
PLACE = "Where it runs"
TURN = "When it runs"
FAILURE = "If it fails or must stop"
SURROUNDINGS = "What it finds there"


def run(
    words: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="What to run, or one job file."),
    ],
    members: Annotated[
        str | None,
        typer.Option(
            "--members",
            "-n",
            metavar="N",
            rich_help_panel=MEMBERS,
            help="Processes that start together, e.g. 4 or 2..8. [1]",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus",
            "-g",
            metavar="G",
            rich_help_panel=MEMBERS,
            help="GPUs of each: 2, or 0.5 of one, or 20G of one. [0]",
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory",
            metavar="SIZE",
            rich_help_panel=MEMBERS,
            help="Only GPUs with at least so much memory, e.g. 40G.",
        ),
    ] = None,
    gpu_model: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu-model",
            metavar="MODEL",
            rich_help_panel=MEMBERS,
            help="Only this model; again: or this one.",
        ),
    ] = None,
    cpus: Annotated[
        str | None,
        typer.Option(
            "--cpus", metavar="C", rich_help_panel=MEMBERS, help="CPUs of each, e.g. 4 or 0.5. [1]"
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            rich_help_panel=MEMBERS,
            help="Memory of each, e.g. 512M or 4G.",
        ),
    ] = None,
    within: Annotated[
        str | None,
        typer.Option(
            "--within",
            metavar="AREA",
            rich_help_panel=PLACE,
            help="Keep it in one node, rack or block, if it can be.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", rich_help_panel=PLACE, help="If it cannot be, wait until it can."),
    ] = False,
    per_node: Annotated[
        int | None,
        typer.Option(
            "--per-node", metavar="K", rich_help_panel=PLACE, help="So many members on each node."
        ),
    ] = None,
    whole_nodes: Annotated[
        bool,
        typer.Option(
            "--whole-nodes", rich_help_panel=PLACE, help="Nothing else beside it on its nodes."
        ),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            rich_help_panel=TURN,
            help="A name for people.",
        ),
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant",
            metavar="NAME",
            rich_help_panel=TURN,
            help="On whose account it runs. [default]",
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority",
            metavar="P",
            rich_help_panel=TURN,
            help="Higher goes first, -1000 to 1000. [0]",
        ),
    ] = None,
    preemptible: Annotated[
        bool,
        typer.Option(
            "--preemptible",
            rich_help_panel=TURN,
            help="May be stopped for others, and run again later.",
        ),
    ] = False,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-every",
            metavar="TIME",
            rich_help_panel=TURN,
            help="How often it saves its work, e.g. 10m.",
        ),
    ] = None,
    estimate: Annotated[
        str | None,
        typer.Option(
            "--estimate",
            metavar="TIME",
            rich_help_panel=TURN,
            help="How long it will run, if you know, e.g. 2h.",
        ),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            "--time-limit",
            metavar="TIME",
            rich_help_panel=TURN,
            help="Stop it then: 90s, 10m, 2h, 1d.",
        ),
    ] = None,
    restart: Annotated[
        str | None,
        typer.Option(
            "--restart",
            metavar="WHEN",
            rich_help_panel=FAILURE,
            help="never, on-node-loss or on-failure. [on-node-loss]",
        ),
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(
            "--retries",
            metavar="N",
            rich_help_panel=FAILURE,
            help="May fail so often; implies on-failure.",
        ),
    ] = None,
    backoff: Annotated[
        str | None,
        typer.Option(
            "--backoff",
            metavar="TIME",
            rich_help_panel=FAILURE,
            help="Before the first retry; doubles. [1s]",
        ),
    ] = None,
    stop_grace: Annotated[
        str | None,
        typer.Option(
            "--stop-grace",
            metavar="TIME",
            rich_help_panel=FAILURE,
            help="From SIGTERM to SIGKILL. [10s]",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="K=V",
            rich_help_panel=SURROUNDINGS,
            help="A variable; K alone copies it from here.",
        ),
    ] = None,
    workdir: Annotated[
        str | None,
        typer.Option(
            "--workdir",
            metavar="DIR",
            rich_help_panel=SURROUNDINGS,
            help="Where to run. [the current directory]",
        ),
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

    An elastic gang (-n 2..8) starts with as many members as there is room for. It gives some up
    when others need the room and, if it saves its work (--checkpoint-every), is restarted larger
    when there is more. A share of a GPU (-g 0.5, or -g 20G: as much of one as 20 GB of its memory
    is) leaves the rest to others; it is counted, not enforced.

    Instead of a command, a file ending in .yaml, .toml or .json may describe the job. Its fields
    are named as the flags (command, members, gpus, ..., time_limit, checkpoint_every); flags
    override them; a relative workdir in it is meant from the file's folder.

    It prints the job's id and returns at once. With --wait it shows the
    output and ends with the job's exit code (124: out of time, 130:
    cancelled). Ctrl-C then only stops the watching, with exit code 130; once
    more within 2 s cancels the job. With --wait --json the output is not
    shown, and the job is printed when it is over.

    Examples:
      shoal run -- python train.py --lr 3e-4
      shoal run -n 2 -g 8 --name big -- python train.py
      shoal run --wait --time-limit 10m --retries 3 -- ./flaky.sh
      shoal run -n 2..8 -g 1 --preemptible --checkpoint-every 10m -- python train.py
      shoal run -n 4 -g 8 --gpu-model H100 --within rack --strict -- python train.py
      shoal run -g 0.5 --tenant research --estimate 2h -- jupyter execute a.ipynb
      shoal run job.yaml -g 4
      id=$(shoal run -- make test); shoal logs -f $id
    """
    from shoal.cli.request import Flags, build

    spec = build(
        words,
        Flags(
            members=members,
            gpus=gpus,
            gpu_memory=gpu_memory,
            gpu_model=gpu_model or None,
            cpus=cpus,
            memory=memory,
            within=within,
            strict=strict or None,
            per_node=per_node,
            whole_nodes=whole_nodes or None,
            name=name,
            tenant=tenant,
            priority=priority,
            preemptible=preemptible or None,
            checkpoint_every=checkpoint_every,
            estimate=estimate,
            time_limit=time_limit,
            restart=restart,
            retries=retries,
            backoff=backoff,
            stop_grace=stop_grace,
            workdir=workdir,
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
