"""`shoal map`: a function of a script over the lines of a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.tasks.cluster import Cluster
    from shoal.tasks.errors import TaskFailed
    from shoal.tasks.files import Counts, Order, Watch
    from shoal.tasks.journal import Journal
    from shoal.tasks.progress import Progress

TRACEBACKS_MAX = 10
CLUSTER = "On the cluster"
LINES_S = 10.0  # between two lines of progress where there is no terminal


def map(  # noqa: A001 - the verb's name
    function: Annotated[
        str, typer.Argument(metavar="SCRIPT.py:FUNCTION", help="Takes one input, gives one output.")
    ],
    inputs: Annotated[
        Path, typer.Argument(metavar="INPUTS", help="A file with JSON in each line.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="One line of JSON per input.")
    ],
    workers: Annotated[
        int,
        typer.Option("--workers", "-n", min=0, max=4096, metavar="N", help="0: one per core."),
    ] = 0,
    init: Annotated[
        str,
        typer.Option(
            "--init", metavar="FUNCTION", help="Called once per worker: shoal.tasks.context()."
        ),
    ] = "",
    on_error: Annotated[
        str,
        typer.Option("--on-error", metavar="WHAT", help="raise (stop there), skip, or return."),
    ] = "raise",
    retries: Annotated[
        int,
        typer.Option("--retries", min=0, max=1000, metavar="N", help="Of a task that fails. [2]"),
    ] = 2,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Workers on the cluster.", rich_help_panel=CLUSTER),
    ] = False,
    gpus: Annotated[
        int,
        typer.Option(
            "--gpus",
            "-g",
            min=0,
            max=256,
            metavar="G",
            help="GPUs of each worker. [0]",
            rich_help_panel=CLUSTER,
        ),
    ] = 0,
    cpus: Annotated[
        str | None,
        typer.Option(
            "--cpus", metavar="C", help="CPUs of each worker. [1]", rich_help_panel=CLUSTER
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="K=V", help="A variable for workers.", rich_help_panel=CLUSTER
        ),
    ] = None,
    requirements: Annotated[
        str | None,
        typer.Option(
            "--requirements", metavar="FILE", help="What pip installs.", rich_help_panel=CLUSTER
        ),
    ] = None,
    pack: Annotated[
        bool | None,
        typer.Option(
            "--pack/--no-pack",
            help="Send the folder along. [if nodes are elsewhere]",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Run a function over the lines of a file, with all cores.

    The function gets the value of each line and returns what is written for it, in the order of
    the inputs. A task that fails, or kills its worker, is tried again alone; then --on-error holds:
    stop there, leave its line out, or write {"error": ..., "line": ..., "traceback": ...} for it.
    If anything fails or is killed on the way, the same command goes on where it was, also with
    another --on-error as long as nothing was skipped: what is done stands in OUTPUT.part and
    OUTPUT.journal until all is there.

    With --cluster the workers are members of one elastic job: as many as
    there is room for, up to --workers (by default all that the cluster
    holds). Inputs and results go between this command and the workers, not
    through the controller. The job ends with this command, however it ends.

    Examples:
      shoal map score.py:score inputs.jsonl -o scores.jsonl
      shoal map score.py:score inputs.jsonl -o scores.jsonl --init load_model --workers 4
      shoal map clean.py:clean pages.jsonl -o clean.jsonl --on-error skip
      shoal map score.py:score inputs.jsonl -o scores.jsonl --json
      shoal map score.py:score inputs.jsonl -o scores.jsonl --cluster --gpus 1 --init load
      shoal map score.py:score inputs.jsonl -o out.jsonl --cluster -n 64 --env MODEL=/nfs/m.pt
    """
    import time

    from shoal.cli.screen import show
    from shoal.tasks.files import identify
    from shoal.tasks.journal import Journal, JournalError
    from shoal.tasks.progress import Progress

    asked = _Asked(gpus, cpus, env or [], requirements, pack)
    if not cluster:
        _refuse_without_cluster(asked)
    where = _cluster(asked, home, function) if cluster else None
    order = _order(function, inputs, output, workers, init, on_error, retries, where)
    identity = identify(order)
    try:
        journal = Journal(order.output, identity)
    except JournalError as error:
        raise Failure(str(error), REFUSED) from None
    began = time.monotonic()
    if journal.known and not json:
        show.note(f"going on: {journal.known:,} of {identity.lines:,} lines are done already")
    try:
        with Progress(identity.lines, quiet=json, done=journal.known, lines_s=LINES_S) as progress:
            counts = _run(order, journal, identity.lines, _watcher(progress))
    except KeyboardInterrupt:
        show.note("interrupted; the same command goes on from here")
        raise
    finally:
        journal.close()
    took_s = time.monotonic() - began
    if json:
        show.as_json({**counts._asdict(), "seconds": round(took_s, 3), "output": str(output)})
    else:
        failed = f", {counts.failed:,} failed" if counts.failed else ""
        show.line(f"{counts.lines:,} lines{failed} in {took_s:.1f} s: {output}")


def _order(
    function: str,
    inputs: Path,
    output: Path,
    workers: int,
    init: str,
    on_error: str,
    retries: int,
    where: Cluster | None,
) -> Order:
    from shoal.tasks.files import Order
    from shoal.tasks.mapping import workers_of

    script, _, name = function.rpartition(":")
    if not script or not name.isidentifier():
        raise Failure("FUNCTION: write SCRIPT.py:FUNCTION, e.g. score.py:score", USAGE)
    if init and not init.isidentifier():
        raise Failure("--init: name a function of the same script, e.g. --init load_model", USAGE)
    if on_error not in ("raise", "skip", "return"):
        raise Failure(f"--on-error: must be raise, skip or return, not '{on_error[:40]}'", USAGE)
    for path in (Path(script), inputs):
        if not path.is_file():
            what = "is not a plain file" if path.exists() else "there is no such file"
            raise Failure(f"{path}: {what}", REFUSED)
    if not output.parent.is_dir():
        raise Failure(f"{output}: there is no folder {output.parent}", REFUSED)
    count = workers or workers_of(where)
    file = Path(script).resolve()
    return Order(file, name, init, inputs, output, count, retries, on_error, where)  # type: ignore[arg-type]


class _Asked(NamedTuple):
    """Flags that are for workers on the cluster."""

    gpus: int
    cpus: str | None
    env: list[str]
    requirements: str | None
    pack: bool | None


def _refuse_without_cluster(asked: _Asked) -> None:
    given = [f"--{name}" for name, value in asked._asdict().items() if value not in (0, None, [])]
    if given:
        raise Failure(f"{given[0]}: is for workers on the cluster; add --cluster", USAGE)


def _cluster(asked: _Asked, home: Path, function: str) -> Cluster:
    from shoal.cli.request import parse_env
    from shoal.forms.failure import BadField
    from shoal.forms.job import to_spec
    from shoal.tasks.cluster import Cluster

    fields: dict[str, object] = {"command": "map", "gpus": asked.gpus}
    if asked.cpus is not None:
        fields["cpus"] = asked.cpus
    if asked.requirements is not None:
        fields["requirements"] = asked.requirements
    try:
        spec = to_spec({**fields, "env": parse_env(asked.env, os.environ)})
    except BadField as error:
        raise Failure(str(error), USAGE) from None
    name = "map-" + "".join(c for c in function.rpartition(":")[2] if c.isascii() and c.isalnum())
    return Cluster(
        gpus=spec.gpus,
        cpus=spec.cpu_milli / 1000,
        env=dict(spec.env),
        requirements=spec.requirements,
        pack=asked.pack,
        home=home,
        name=name[:63],
    )


def _run(order: Order, journal: Journal, lines: int, watch: Watch) -> Counts:
    from shoal.tasks.errors import InitFailed, TaskFailed, Unloadable
    from shoal.tasks.files import BadLine, map_file

    try:
        return map_file(order, journal, lines, watch)
    except (BadLine, Unloadable) as error:
        raise Failure(str(error), REFUSED) from None
    except InitFailed as error:
        _print_traceback(str(error.__cause__.__cause__) if error.__cause__ else "")
        raise Failure(str(error), REFUSED) from None
    except TaskFailed as error:
        _print_traceback(error.traceback)
        kept = f"{journal.known:,} of {lines:,} lines are done and kept"
        fix = "the same command goes on from there; with --on-error skip or return past this line"
        raise Failure(f"{order.inputs} {_what(error)}; {kept}: {fix}", REFUSED) from None


def _watcher(progress: Progress) -> Watch:
    told = 0

    def watch(length: int, failure: TaskFailed | None) -> None:
        nonlocal told
        progress.add(length, failed=failure is not None)
        if failure is not None:
            from shoal.cli.screen import show

            told += 1
            if told <= TRACEBACKS_MAX:
                _print_traceback(failure.traceback)
            show.note(_what(failure))

    return watch


def _what(failure: TaskFailed) -> str:
    name = type(failure.error).__name__
    times = "once" if failure.tries == 1 else f"{failure.tries} times"
    return f"line {failure.index + 1} failed {times}: {name}: {failure.error}"


def _print_traceback(text: str) -> None:
    """Of the user's own function, so it is shown as it is, line by line."""
    from shoal.cli.screen import show

    for line in text.strip().splitlines():
        show.note(line)
