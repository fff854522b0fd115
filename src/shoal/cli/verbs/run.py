"""`shoal run`: submits a command, or a gang of them, as a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.cli.command import Argument, RunVerb, flag, flags_of, verb
from shoal.cli.verbs.schedule import CRON, FILE, MISSED, OVERLAP, TIMEZONE
from shoal.forms.failure import USAGE, Failure
from shoal.forms.fields import JOB

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.cli.cluster import Retry
    from shoal.model.job import JobSpec
    from shoal.model.views import JobView, NodeView
    from shoal.model.workflow import WorkflowJob

SECOND_INTERRUPT_S = 2.0


@verb(
    Argument("words", "COMMAND...", "The command to run, or a job or workflow file.", nargs=-1),
    *flags_of(JOB),
    CRON,
    TIMEZONE,
    OVERLAP,
    MISSED,
    FILE,
    flag("--tty", "-t", help="With -i, as other tools write it: -it."),
    flag("--wait", help="Show the output and end with the job's exit code."),
    cls=RunVerb,
)
def run(
    words: tuple[str, ...],
    file: str | None,
    tty: bool,
    wait: bool,
    json: bool,
    home: Path,
    **flags: Any,
) -> int:
    """Run a command, or a gang of them, on the cluster.

    The members of a gang start together or not at all. Each finds its rank and the
    other members in its environment, under the names that torchrun uses. PATH,
    VIRTUAL_ENV, CONDA_PREFIX, PYTHONPATH and LANG are sent along, so that `python`
    means the same in the job as in your shell.

    A member is one process: -n 4 -g 8 starts four processes that see eight GPUs
    each. For a script that wants one process per GPU, as torchrun starts them, add
    --procs-per-node gpu: that makes four nodes with eight processes each.

    A command that starts the processes of other nodes by itself, such as mpirun or
    deepspeed, runs in member 0 with --launcher: docs/mpi.md.

    An elastic gang (-n 2..8) starts with as many members as there is room for. If it
    is --preemptible, it gives members up when other jobs need the room. If it saves
    its work (--checkpoint-every), it is restarted larger when no job waits. Neither
    happens in its first five minutes (run_min of the policy). A share of a GPU
    (-g 0.5, or -g 20G) leaves the rest to other jobs. What enforces it is in
    docs/gpu-shares.md.

    --array makes it an array: one id, j7, and one job for each index, j7.0, j7.1, ...
    An element finds its index in $SHOAL_ARRAY_INDEX, and {index} in the command is
    replaced by it. A sweep (--grid, --list) makes an array over variables: {lr} in the
    command and $lr in the environment have the element's value (docs/arrays.md).

    A file that ends in .yaml, .toml or .json can describe the job instead. Its fields
    have the names of the flags (command, members, gpus, ..., checkpoint_every). Flags
    override the file. A relative path in it counts from the file's folder.

    Where nodes are other machines, or you are not on the head, the folder is sent
    along: the git repository that it is in, without ignored files, once to each node
    and read-only there (--pack). From another machine, PATH and VIRTUAL_ENV stay there.
    Write results to $SHOAL_CHECKPOINT_DIR, or to $SHOAL_SCRATCH, which is removed when
    the job ends. The packages of --requirements are installed once on each node.

    A file with `jobs:` is a workflow: named jobs with the fields of a job file, of
    which `after:` names others. All are submitted, or none (docs/workflows.md).
    --after and --begin make a single job wait, --cron makes it a schedule.

    It prints the job's id and returns at once. With --wait it shows the output and
    ends with the job's exit code (124: over its time limit, 130: cancelled). Ctrl-C
    then stops only the watching, with exit code 130; Ctrl-C again within 2 s cancels
    the job. With --wait --json it prints the job when it has ended, without output.

    Examples:
      shoal run -- python train.py --lr 3e-4
      shoal run -n 2 -g 8 --name big -- python train.py
      shoal run -n 4 -g 8 --procs-per-node gpu -- python ddp.py
      shoal run --wait --time-limit 10m --retries 3 -- ./flaky.sh
      shoal run -n 2..8 -g 1 --checkpoint-every 10m -- python train.py
      shoal run -n 4 -g 8 --gpu-model H100 --within rack -- python train.py
      shoal run -g 0.5 --tenant research --estimate 2h -- python eval.py
      shoal run -n 4 -g 8 --launcher -- mpirun python train.py
      shoal run --pack --requirements requirements.txt -- python train.py
      shoal run --array 0-99%8 -- python eval.py --shard {index}
      shoal run --grid lr=0.1,0.01 --grid seed=1,2,3 -- python train.py --lr {lr}
      shoal run -it -g 1 -- bash
      shoal run job.yaml -g 4
      shoal run --after j7 --after j8:any -- python report.py
      shoal run --begin 'in 2h' -- python train.py
      shoal run -f flow.yaml
      shoal run --name nightly --cron '0 3 * * *' -- python eval.py
      id=$(shoal run -- make test); shoal logs -f $id
    """
    return _run([file, *words] if file else list(words), tty, wait, json, home, flags)


def _run(
    words: list[str],
    tty: bool,
    wait: bool,
    json: bool,
    home: Path,
    flags: dict[str, Any],
) -> int:
    from shoal.cli.request import assemble_jobs
    from shoal.cli.screen.show import at_keyboard

    flags["interactive"] = flags["interactive"] or tty or None
    when = tuple(flags.pop(name) for name in ("cron", "timezone", "overlap", "missed"))
    if when[0]:
        return _schedule(words, when, flags, json, home)
    jobs, pack, flow = assemble_jobs(words, flags)
    if flow:
        return _run_workflow(jobs, pack, wait, json, home)
    view = _submit(jobs[0].spec, pack, json, home)
    if wait:
        return _wait(view, home, json)
    if view.spec.interactive and not (json or view.array) and at_keyboard():
        return _attach(view.id, home)
    _print_submitted(view, json)
    return 0


def _schedule(
    words: list[str], when: tuple[Any, ...], flags: dict[str, Any], json: bool, home: Path
) -> int:
    from shoal.cli import cluster
    from shoal.cli.verbs.schedule import add

    name = flags.get("name")
    if not name:
        raise Failure("--cron: a schedule needs a name; add e.g. --name nightly", USAGE)
    with cluster.connect(home) as client:
        add(client, name, words, None, when, flags, json)
    return 0


def _run_workflow(
    jobs: list[WorkflowJob], pack: bool | None, wait: bool, json: bool, home: Path
) -> int:
    """With `wait`, exit code 1 says that not all of its jobs succeeded."""
    from shoal.cli import cluster
    from shoal.cli.request import packed_jobs
    from shoal.cli.screen import show
    from shoal.cli.screen.follow import wait_for_end
    from shoal.cli.verbs.schedule import print_workflow

    with cluster.connect(home) as client:
        view = client.submit_workflow(packed_jobs(client, jobs, pack, None if json else show.note))
    if wait:
        with cluster.Retry(home) as retry:
            for node in view.nodes:
                wait_for_end(retry, node.id)
            view = retry(lambda c: c.workflow(view.id))
    if json:
        show.as_json(view)
    elif not show.at_terminal() and not wait:
        print(view.id)
    else:
        print_workflow(view)
        show.line(f"watch it with: shoal workflow {view.id}", "dim")
    return 0 if not wait or view.state == "succeeded" else 1


def _submit(spec: JobSpec, pack: bool | None, json: bool, home: Path) -> JobView:
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.forms.pack import packed

    with cluster.connect(home) as client:
        spec = packed(client, spec, pack, None if json else show.note)
        view = client.submit(spec)
        if spec.checkpoint_ms and not json and not client.policy().checkpoint_copy_mb:
            _warn_unshared(client.nodes())
    return view


def _warn_unshared(nodes: list[NodeView]) -> None:
    """A job finds its checkpoints only on nodes that share the folder."""
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
            f"these nodes do not share their checkpoints: {named}{more}; a job that moves from one "
            "to another starts over; set checkpoint_copy_mb in the policy, or "
            "SHOAL_CHECKPOINT_ROOT to a shared folder before shoal up and shoal join"
        )


def _print_submitted(view: JobView, json: bool) -> None:
    from shoal.cli.screen.show import as_json, at_terminal, line

    if json:
        as_json(view)
        return
    if not at_terminal():
        print(view.id)
        return
    line(f"{view.id} submitted: {submitted_text(view)}", "bold")
    watch = f"shoal ps --array {view.id}" if view.array else f"shoal logs -f {view.id}"
    line(f"watch it with: {watch}", "dim")


def submitted_text(view: JobView) -> str:
    from shoal.model.phrases import shape_text, sweep_text

    if view.spec.sweep is None:
        return shape_text(view.spec)
    return f"an array of {sweep_text(view.spec.sweep)}: {shape_text(view.spec)} each"


def _attach(job: str, home: Path) -> int:
    from shoal.cli.screen.show import note
    from shoal.cli.verbs.inside import follow_terminal

    note(f"[{job} submitted; detach with Ctrl-P Ctrl-Q]")
    return follow_terminal(job, home)


def _wait(view: JobView, home: Path, json: bool) -> int:
    """The exit code of the job, when it has ended."""
    from shoal.cli.cluster import Retry
    from shoal.cli.screen import show
    from shoal.cli.screen.follow import wait_for_end
    from shoal.cli.screen.words import state_text

    if not json:
        show.note(f"[{view.id} submitted: {submitted_text(view)}]")
    try:
        with Retry(home) as retry:
            if json:
                end = wait_for_end(retry, view.id)
                show.as_json(end)
            elif view.array is not None:
                end = _watch_array(retry, view.id, home)
            else:
                members = list(range(max(view.members, view.members_max)))
                end = _follow(retry, view.id, members, home)
    except KeyboardInterrupt:
        return _detach(view.id, home)
    if end.state != "succeeded" and not json:
        because = f": {end.why}" if end.why else ""
        show.note(f"[{end.id} {state_text(end.state)}{because}]")
    return exit_code(end)


def _watch_array(retry: Retry, array: str, home: Path) -> JobView:
    """Its elements' output would be mixed up: a line of progress instead, until it has ended."""
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.cli.screen.follow import StatusLine, StatusUpdater, has_status_line, wait_for_end

    show.note(f"[see an element's output with: shoal logs {array}.INDEX]")
    if not has_status_line():
        return wait_for_end(retry, array)
    with (
        cluster.connect(home) as client,
        StatusLine() as line,
        StatusUpdater(line, lambda: client.job(array)),
    ):
        return wait_for_end(retry, array)


def _follow(retry: Retry, job: str, members: list[int], home: Path) -> JobView:
    """Shows the output until the job ends; at a terminal, with a line of progress below it."""
    from shoal.cli import cluster
    from shoal.cli.screen.follow import (
        OutputAbove,
        StatusLine,
        StatusUpdater,
        follow,
        has_status_line,
    )
    from shoal.cli.verbs.logs import make_output

    prefixed = len(members) > 1
    out = make_output(prefixed=prefixed, json=False)
    if not has_status_line():
        return follow(retry, job, members, out, from_attempt=1)
    with (
        cluster.connect(home) as client,
        StatusLine() as line,
        StatusUpdater(line, lambda: client.job(job)),
    ):
        above = OutputAbove(out, line, prefixed)
        return follow(retry, job, members, above, from_attempt=1)


def _detach(job: str, home: Path) -> int:
    """The first Ctrl-C stops the watching, the second cancels the job."""
    import sys
    import time

    from shoal.cli import cluster
    from shoal.cli.errors import INTERRUPTED
    from shoal.cli.screen import show

    try:
        if sys.stderr.isatty():
            show.note("")  # the terminal shows ^C on the line before
        show.note(
            f"[{job} keeps running; watch it with: shoal logs -f {job} (Ctrl-C again cancels it)]"
        )
        time.sleep(SECOND_INTERRUPT_S)
    except KeyboardInterrupt:
        with cluster.connect(home) as client:
            done = client.cancel(job)
        show.note(f"[{job}: {done.note}]" if done.note else f"[{job} cancelled]")
    return INTERRUPTED


def exit_code(view: JobView) -> int:
    """The job's exit code as a shell can have it: never 0 for a job that did not succeed."""
    code = view.code if view.code is not None else 1
    if view.state == "succeeded":
        return 0
    return code if 0 < code < 256 else 1
