"""`shoal upgrade`: this version takes over a cluster that is up, and no job is stopped."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import flag, verb


@verb(flag("--check", help="Only show which version runs where."), on_head=True)
def upgrade(check: bool, json: bool, home: Path) -> None:
    """Bring this version of Shoal to the cluster; jobs go on.

    Install the new version first (pip install -U shoal), then run this command.
    The head is replaced at once; it is away for a moment, and commands wait for
    it. Jobs and services go on. Then each node of this machine is replaced, one
    at a time, if nothing runs on it. A node where jobs run keeps its version,
    which works with the new head; run the command again when they have ended.

    Machines that joined are upgraded there: install the new version, then run
    `shoal leave` and `shoal join`, or `shoal up --hosts` here.

    Make a backup first (`shoal backup`): an older version cannot read what a
    newer one has written.

    Examples:
      shoal upgrade --check
      shoal backup before.tar && pip install -U shoal && shoal upgrade
    """
    from shoal.cli.screen import show
    from shoal.control.home import Home
    from shoal.control.lifecycle import LifecycleError
    from shoal.control.upgrading import upgrade as bring
    from shoal.control.upgrading import versions
    from shoal.forms.failure import Failure

    try:
        if check:
            parts = versions(Home(home))
        else:
            with show.Spinner(quiet=json) as progress:
                parts = bring(Home(home), progress)
    except LifecycleError as error:
        raise Failure(str(error)) from None
    if json:
        show.as_json(parts)
        return
    columns = [show.Column("PART"), show.Column("VERSION")]
    if not check:
        columns += [show.Column("STATE"), show.Column("WHY", wraps=True)]
    rows: list[list[str | show.Cell]] = [
        [one.part, one.version or "before 0.6", *(() if check else (one.state, one.why))]
        for one in parts
    ]
    show.table(columns, rows)
