"""`shoal run`: a command, or a gang of them, becomes a job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption

if TYPE_CHECKING:
    from shoal.cli.reach import Steady
    from shoal.model.views import JobView, NodeView

SECOND_INTERRUPT_S = 2.0

# The headings of the help page.
MEMBERS = "What it is"
PLACE = "Where it runs"
TURN = "When it runs"
FAILURE = "If it fails or must stop"
SURROUNDINGS = "What it finds there"


def _flag(heading: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=heading)


def run(
    words: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="What to run, or one job file."),
    ],
    members: Annotated[
        str | None,
        _flag(
            MEMBERS,
            "Processes that start together, e.g. 4 or 2..8. [1]",
            "--members",
            "-n",
            metavar="N",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        _flag(
            MEMBERS,
            "GPUs of each: 2, or 0.5 of one, or 20G of one. [0]",
            "--gpus",
            "-g",
            metavar="G",
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        _flag(
            MEMBERS,
            "Only GPUs with at least so much memory, e.g. 40G.",
            "--gpu-memory",
            metavar="SIZE",
        ),
    ] = None,
    gpu_model: Annotated[
        list[str] | None,
        _flag(MEMBERS, "Only this model; again: or this one.", "--gpu-model", metavar="MODEL"),
    ] = None,
    cpus: Annotated[
        str | None, _flag(MEMBERS, "CPUs of each, e.g. 4 or 0.5. [1]", "--cpus", metavar="C")
    ] = None,
    memory: Annotated[
        str | None,
        _flag(MEMBERS, "Memory of each, e.g. 512M or 4G.", "--memory", metavar="SIZE"),
    ] = None,
    within: Annotated[
        str | None,
        _flag(
            PLACE, "Keep it in one node, rack or block, if it can be.", "--within", metavar="AREA"
        ),
    ] = None,
    strict: Annotated[
        bool, _flag(PLACE, "If it cannot be, wait until it can.", "--strict")
    ] = False,
    per_node: Annotated[
        int | None, _flag(PLACE, "So many members on each node.", "--per-node", metavar="K")
    ] = None,
    procs_per_node: Annotated[
        str | None,
        _flag(
            PLACE,
            "Processes that share each member's GPUs: 8, or gpu.",
            "--procs-per-node",
            metavar="P",
        ),
    ] = None,
    whole_nodes: Annotated[
        bool, _flag(PLACE, "Nothing else beside it on its nodes.", "--whole-nodes")
    ] = False,
    name: Annotated[str | None, _flag(TURN, "A name for people.", "--name", metavar="NAME")] = None,
    tenant: Annotated[
        str | None,
        _flag(TURN, "On whose account it runs. [default]", "--tenant", metavar="NAME"),
    ] = None,
    priority: Annotated[
        int | None,
        _flag(TURN, "Higher goes first, -1000 to 1000. [0]", "--priority", metavar="P"),
    ] = None,
    preemptible: Annotated[
        bool, _flag(TURN, "May be stopped for others, and run again later.", "--preemptible")
    ] = False,
    checkpoint_every: Annotated[
        str | None,
        _flag(TURN, "How often it saves its work, e.g. 10m.", "--checkpoint-every", metavar="TIME"),
    ] = None,
    estimate: Annotated[
        str | None,
        _flag(TURN, "How long it will run, if you know, e.g. 2h.", "--estimate", metavar="TIME"),
    ] = None,
    time_limit: Annotated[
        str | None,
        _flag(TURN, "Stop it then: 90s, 10m, 2h, 1d.", "--time-limit", metavar="TIME"),
    ] = None,
    restart: Annotated[
        str | None,
        _flag(
            FAILURE,
            "never, on-node-loss or on-failure. [on-node-loss]",
            "--restart",
            metavar="WHEN",
        ),
    ] = None,
    retries: Annotated[
        int | None,
        _flag(FAILURE, "May fail so often; implies on-failure.", "--retries", metavar="N"),
    ] = None,
    backoff: Annotated[
        str | None,
        _flag(FAILURE, "Before the first retry; doubles. [1s]", "--backoff", metavar="TIME"),
    ] = None,
    stop_grace: Annotated[
        str | None,
        _flag(FAILURE, "From SIGTERM to SIGKILL. [10s]", "--stop-grace", metavar="TIME"),
    ] = None,
    env: Annotated[
        list[str] | None,
        _flag(SURROUNDINGS, "A variable; K alone copies it from here.", "--env", metavar="K=V"),
    ] = None,
    workdir: Annotated[
        str | None,
        _flag(SURROUNDINGS, "Where to run. [the current directory]", "--workdir", metavar="DIR"),
    ] = None,
    requirements: Annotated[
        str | None,
        _flag(SURROUNDINGS, "What pip shall install for it.", "--requirements", metavar="FILE"),
    ] = None,
    pack: Annotated[
        bool | None,
        _flag(SURROUNDINGS, "Send the folder along. [if nodes are elsewhere]", "--pack/--no-pack"),
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

    A member is one process, whatever it asks for: -n 4 -g 8 is four that
    see eight GPUs each. For scripts that want a process for each GPU, as
    torchrun starts them, add --procs-per-node gpu: four nodes with eight.

    An elastic gang (-n 2..8) starts with as many members as there is room
    for. If it is --preemptible, it gives some up when others need the room;
    if it saves its work (--checkpoint-every), it is restarted larger when
    nobody waits. Neither happens before it ran for five minutes (run_ms_min
    of the policy). A share of a GPU (-g 0.5, or -g 20G: as much of one as 20 GB of its memory
    is) leaves the rest to others; it is counted, not enforced.

    Instead of a command, a file ending in .yaml, .toml or .json may describe
    the job. Its fields are named as the flags (command, members, gpus, ...,
    checkpoint_every); flags override them; a relative workdir in it is meant
    from the file's folder.

    Where nodes are other machines, the folder goes along: the repository it
    is in without what git ignores (it says what that is), sent to each node
    once and read-only there (--pack; on one machine jobs run in place).
    What it writes belongs into $SHOAL_CHECKPOINT_DIR, or $SHOAL_SCRATCH,
    which ends with it. What --requirements lists is installed once on each
    node.

    It prints the job's id and returns at once. With --wait it shows the
    output and ends with the job's exit code (124: out of time, 130:
    cancelled); at a terminal a line below it tells how far the job is. Ctrl-C
    then only stops the watching, with exit code 130; once more within 2 s
    cancels the job. With --wait --json the output is not shown, and the job
    is printed when it is over.

    Examples:
      shoal run -- python train.py --lr 3e-4
      shoal run -n 2 -g 8 --name big -- python train.py
      shoal run -n 4 -g 8 --procs-per-node gpu -- python ddp.py
      shoal run --wait --time-limit 10m --retries 3 -- ./flaky.sh
      shoal run -n 2..8 -g 1 --checkpoint-every 10m -- python train.py
      shoal run -n 4 -g 8 --gpu-model H100 --within rack -- python train.py
      shoal run -g 0.5 --tenant research --estimate 2h -- python eval.py
      shoal run --pack --requirements requirements.txt -- python train.py
      shoal run job.yaml -g 4
      id=$(shoal run -- make test); shoal logs -f $id
    """
    given = locals()  # before anything else has a name here
    from shoal.cli import reach
    from shoal.cli.request import assemble
    from shoal.cli.screen import show
    from shoal.forms.pack import packed
    from shoal.forms.request import JOB

    spec, pack = assemble(JOB, words, given)
    with reach.connect(home) as client:
        spec = packed(client, spec, pack, None if json else show.note)
        view = client.submit(spec)
        if spec.checkpoint_ms and not json:
            _tell_unshared(client.nodes())
    if wait:
        raise typer.Exit(_wait(view, home, json))
    _print_submitted(view, json)


def _tell_unshared(nodes: list[NodeView]) -> None:
    """A job that saves its work finds it only on nodes that see the same place."""
    from shoal.cli.screen import show

    groups: dict[str, list[str]] = {}
    for node in nodes:
        if node.checkpoints:
            groups.setdefault(node.checkpoints, []).append(node.id)
    if len(groups) > 1:
        named = " | ".join(
            ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            for names in list(groups.values())[:3]
        )
        more = " | ..." if len(groups) > 3 else ""
        show.note(
            f"these nodes do not see each other's checkpoints: {named}{more}; a job that has to go "
            "to another starts over; set SHOAL_CHECKPOINT_ROOT to a place that all see, before "
            "shoal up and shoal join"
        )


def _print_submitted(view: JobView, json: bool) -> None:
    from shoal.cli.screen.show import as_json, at_terminal, line
    from shoal.cli.screen.words import shape_text

    if json:
        as_json(view)
        return
    if not at_terminal():
        print(view.id)
        return
    line(f"{view.id} submitted: {shape_text(view.spec)}", "bold")
    line(f"watch it with: shoal logs -f {view.id}", "dim")


def _wait(view: JobView, home: Path, json: bool) -> int:
    """Its exit code, when it is over."""
    from shoal.cli.reach import Steady
    from shoal.cli.screen import show
    from shoal.cli.screen.follow import wait_for_end
    from shoal.cli.screen.words import shape_text, state_text

    if not json:
        show.note(f"[{view.id} submitted: {shape_text(view.spec)}]")
    try:
        with Steady(home) as steady:
            if json:
                end = wait_for_end(steady, view.id)
                show.as_json(end)
            else:
                members = list(range(max(view.members, view.members_max)))
                end = _follow(steady, view.id, members, home)
    except KeyboardInterrupt:
        return _detach(view.id, home)
    if end.state != "succeeded" and not json:
        because = f": {end.why}" if end.why else ""
        show.note(f"[{end.id} {state_text(end.state)}{because}]")
    return exit_code(end)


def _follow(steady: Steady, job: str, members: list[int], home: Path) -> JobView:
    """Its output to the end; at a terminal with a line below that tells how far it is."""
    from shoal.cli import reach
    from shoal.cli.screen import lastline
    from shoal.cli.screen.follow import follow
    from shoal.cli.verbs.logs import make_output

    prefixed = len(members) > 1
    out = make_output(prefixed=prefixed, json=False)
    if not lastline.wanted():
        return follow(steady, job, members, out, from_attempt=1)
    with (
        reach.connect(home) as client,
        lastline.LastLine() as line,
        lastline.Watcher(line, lambda: client.job(job)),
    ):
        above = lastline.Above(out, line, prefixed)
        return follow(steady, job, members, above, from_attempt=1)


def _detach(job: str, home: Path) -> int:
    """Once is for the watching, twice is for the job."""
    import sys
    import time

    from shoal.cli import reach
    from shoal.cli.guard import INTERRUPTED
    from shoal.cli.screen import show

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
