"""`shoal map`: a function of a script over the lines of a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.command import Argument, Option, flag, flags_of, given_of, number, verb
from shoal.forms.failure import REFUSED, USAGE, Failure
from shoal.forms.fields import JOB
from shoal.forms.readers import Count

if TYPE_CHECKING:
    from shoal.tasks.cluster import Cluster
    from shoal.tasks.errors import TaskFailed
    from shoal.tasks.files import Counts, Journal, MapRequest, Watch
    from shoal.tasks.mapping import Progress

TRACEBACKS_MAX = 10
CLUSTER = "On the cluster"
# A worker has these fields of a job.
WORKER = {
    name: JOB[name]._replace(heading=CLUSTER)
    for name in ("gpus", "cpus", "env", "requirements", "pack")
}
WORKER["gpus"] = WORKER["gpus"]._replace(
    read=Count(0, 256, "GPUs per worker"), help="Whole GPUs per worker."
)
LINES_S = 10.0  # between two lines of progress if there is no terminal


@verb(
    Argument("function", "SCRIPT.py:FUNCTION", "A function of one input that returns one output."),
    Argument(
        "inputs", "INPUTS", "JSON lines, a .csv, .tsv or .parquet file, or - for stdin.", type=Path
    ),
    Option(
        "--output",
        "-o",
        metavar="FILE",
        type=Path,
        required=True,
        help="Write one line of JSON per input to this file.",
    ),
    Option(
        "--workers",
        "-n",
        metavar="N",
        type=number(0, 4096),
        default=0,
        help="Number of workers. [one per core]",
    ),
    Option(
        "--init",
        metavar="FUNCTION",
        default="",
        help="Call this once per worker; shoal.tasks.context() returns its result.",
    ),
    Option(
        "--on-error",
        metavar="ACTION",
        default="raise",
        help="raise (stop), skip, or return (the error). [raise]",
    ),
    Option(
        "--retries",
        metavar="N",
        type=number(0, 1000),
        default=2,
        help="Try a failed task again this often. [2]",
    ),
    flag("--cluster", help="Run the workers on the cluster.", heading=CLUSTER),
    *flags_of(WORKER),
)
def map(  # noqa: A001 - the verb's name
    function: str,
    inputs: Path,
    output: Path,
    workers: int,
    init: str,
    on_error: str,
    retries: int,
    cluster: bool,
    json: bool,
    home: Path,
    **flags: Any,
) -> None:
    """Run a function over the lines of a file, on all cores.

    The function gets the value of each line; of a CSV or Parquet file it gets
    each row as a dict. What it returns is written in the order of the inputs.
    A task that fails or kills its worker is tried again alone. If it still
    fails, --on-error decides: stop, leave the line out, or write
    {"error": ..., "line": ..., "traceback": ...} for it.

    If the command is interrupted or fails, run it again: it continues where it
    stopped. A different --on-error is fine if no line was skipped. Finished
    lines are kept in OUTPUT.part and OUTPUT.journal until all are done.

    With --cluster the workers are members of one elastic job: as many as fit,
    up to --workers (by default as many as the cluster holds). Inputs and
    results go directly between this command and the workers; from another
    machine, through the head. The job ends when this command ends.

    Examples:
      shoal map score.py:score inputs.jsonl -o scores.jsonl
      shoal map score.py:score inputs.jsonl -o scores.jsonl --init load_model --workers 4
      shoal map clean.py:clean pages.jsonl -o clean.jsonl --on-error skip
      shoal map clean.py:clean rows.csv -o clean.jsonl
      zcat pages.gz | shoal map clean.py:clean - -o clean.jsonl
      shoal map score.py:score inputs.jsonl -o scores.jsonl --cluster --gpus 1 --init load
      shoal map score.py:score inputs.jsonl -o out.jsonl --cluster -n 64 --env MODEL=/nfs/m.pt
    """
    import time

    from shoal.cli.screen import show
    from shoal.tasks.files import BadInputs, lines_of

    given = given_of(flags)
    if given and not cluster:
        flag_given = WORKER[next(iter(given))].flag
        raise Failure(f"{flag_given}: is for workers on the cluster; add --cluster", USAGE)
    where = _cluster(given, home, function) if cluster else None
    request = _request(function, inputs, output, workers, init, on_error, retries, where)
    began = time.monotonic()
    try:
        with lines_of(inputs, output) as lines:
            counts = _mapped(request._replace(inputs=lines), json)
    except BadInputs as error:
        raise Failure(str(error), REFUSED) from None
    took_s = time.monotonic() - began
    if json:
        show.as_json({**counts._asdict(), "seconds": round(took_s, 3), "output": str(output)})
    else:
        failed = f", {counts.failed:,} failed" if counts.failed else ""
        show.line(f"{counts.lines:,} lines{failed} in {took_s:.1f} s: {output}")


def _mapped(request: MapRequest, json: bool) -> Counts:
    from shoal.cli.screen import show
    from shoal.tasks.files import Journal, JournalError, identify
    from shoal.tasks.mapping import Progress

    identity = identify(request)
    try:
        journal = Journal(request.output, identity)
    except JournalError as error:
        raise Failure(str(error), REFUSED) from None
    if journal.known and not json:
        show.note(f"continuing: {journal.known:,} of {identity.lines:,} lines are already done")
    try:
        with Progress(identity.lines, quiet=json, done=journal.known, lines_s=LINES_S) as progress:
            return _run(request, journal, identity.lines, _watcher(progress))
    except KeyboardInterrupt:
        show.note("interrupted; run the same command again to continue")
        raise
    finally:
        journal.close()


def _request(
    function: str,
    inputs: Path,
    output: Path,
    workers: int,
    init: str,
    on_error: str,
    retries: int,
    where: Cluster | None,
) -> MapRequest:
    from shoal.tasks.files import MapRequest
    from shoal.tasks.mapping import workers_of

    script, _, name = function.rpartition(":")
    if not script or not name.isidentifier():
        raise Failure("FUNCTION: write SCRIPT.py:FUNCTION, e.g. score.py:score", USAGE)
    if init and not init.isidentifier():
        raise Failure("--init: name a function of the same script, e.g. --init load_model", USAGE)
    if on_error not in ("raise", "skip", "return"):
        raise Failure(f"--on-error: must be raise, skip or return, not '{on_error[:40]}'", USAGE)
    from shoal.tasks.files import STANDARD

    for path in (Path(script), inputs):
        if path != STANDARD and not path.is_file():
            what = "is not a regular file" if path.exists() else "there is no such file"
            raise Failure(f"{path}: {what}", REFUSED)
    if not output.parent.is_dir():
        raise Failure(f"{output}: there is no folder {output.parent}", REFUSED)
    count = workers or workers_of(where)
    file = Path(script).resolve()
    shown = "standard input" if inputs == STANDARD else str(inputs)
    return MapRequest(file, name, init, inputs, output, count, retries, on_error, where, shown)  # type: ignore[arg-type]


def _cluster(given: dict[str, Any], home: Path, function: str) -> Cluster:
    from shoal.cli.cluster import context_in_use
    from shoal.cli.request import parse_env
    from shoal.forms.failure import BadField
    from shoal.forms.job import to_spec
    from shoal.tasks.cluster import Cluster

    try:
        given["env"] = parse_env(given.get("env", ()), os.environ)
        spec = to_spec({"command": "map", **given})
    except BadField as error:
        raise Failure(str(error), USAGE) from None
    name = "map-" + "".join(c for c in function.rpartition(":")[2] if c.isascii() and c.isalnum())
    return Cluster(
        gpus=spec.gpus,
        cpus=spec.cpu_milli / 1000,
        env=dict(spec.env),
        requirements=spec.requirements,
        pack=given.get("pack"),
        home=None if context_in_use() else home,
        name=name[:63],
        context=context_in_use(),
    )


def _run(request: MapRequest, journal: Journal, lines: int, watch: Watch) -> Counts:
    from shoal.tasks.errors import InitFailed, TaskFailed, Unloadable
    from shoal.tasks.files import BadLine, map_file

    try:
        return map_file(request, journal, lines, watch)
    except (BadLine, Unloadable) as error:
        raise Failure(str(error), REFUSED) from None
    except InitFailed as error:
        _print_traceback(str(error.__cause__.__cause__) if error.__cause__ else "")
        raise Failure(str(error), REFUSED) from None
    except TaskFailed as error:
        _print_traceback(error.traceback)
        kept = f"{journal.known:,} of {lines:,} lines are done and kept"
        fix = "run the same command again to continue, with --on-error skip or return to go past it"
        raise Failure(f"{request.shown} {_what(error)}; {kept}: {fix}", REFUSED) from None


def _watcher(progress: Progress) -> Watch:
    printed = 0

    def watch(length: int, failure: TaskFailed | None) -> None:
        nonlocal printed
        progress.add(length, failed=failure is not None)
        if failure is not None:
            from shoal.cli.screen import show

            printed += 1
            if printed <= TRACEBACKS_MAX:
                _print_traceback(failure.traceback)
            show.note(_what(failure))

    return watch


def _what(failure: TaskFailed) -> str:
    name = type(failure.error).__name__
    times = "once" if failure.tries == 1 else f"{failure.tries} times"
    return f"line {failure.index + 1} failed {times}: {name}: {failure.error}"


def _print_traceback(text: str) -> None:
    """The traceback of the user's own function, unchanged."""
    from shoal.cli.screen import show

    for line in text.strip().splitlines():
        show.note(line)
