"""`shoal attach`: the terminal of an interactive job."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import Argument, verb

LOOK_S = 10.0
ENTERED = ("running", "dozing", "asleep", "waking")  # a session can begin; a sleeper is woken


@verb(Argument("job", "JOB[.MEMBER]", "An interactive job."))
def attach(job: str, json: bool, home: Path) -> int:  # noqa: ARG001
    """Attach to the terminal of an interactive job.

    The job was submitted with --interactive, or with `shoal run -it`. You see
    its recent output and what follows, and what you type is its input. Several
    users may be attached at once. Ctrl-P Ctrl-Q, or ~. at the start of a line,
    detaches; the job goes on. The exit code is the job's own. Its output is
    in its log, as that of every job.

    Examples:
      shoal attach j7
      shoal attach j7.1
    """
    from shoal.cli import cluster
    from shoal.cli.verbs.forward import target_of

    with cluster.connect(home) as client:
        target = target_of(client, job, None)()
    return join_terminal(target, home)


def follow_terminal(job: str, home: Path) -> int:
    """When it runs."""
    from shoal.cli.cluster import Retry
    from shoal.cli.screen.show import note

    with Retry(home) as retry:
        view = retry(lambda client: client.job(job, wait_for="running", wait_s=1))
        if view.finished_ms is None and view.state not in ENTERED:
            note(
                f"[{job} is {view.state}: {view.why}; Ctrl-C leaves it, shoal attach {job} returns]"
            )
        while view.finished_ms is None and view.state not in ENTERED:
            view = retry(lambda client: client.job(job, wait_for="running", wait_s=LOOK_S))
    return join_terminal((job, 0), home)


def join_terminal(target: tuple[str, int], home: Path) -> int:
    from shoal.cli import cluster
    from shoal.cli.screen.show import note
    from shoal.model.session import Kind
    from shoal.sessions.terminal import converse

    with cluster.connect(home) as client:
        found = converse(client, Kind.ATTACH, target, interactive=True, terminal=True, tell=note)
    if found.detached:
        note("")  # the line that the terminal was in
        note(f"[detached; {target[0]} goes on: shoal attach {target[0]}]")
    elif found.why:
        note(found.why)
    return found.code
