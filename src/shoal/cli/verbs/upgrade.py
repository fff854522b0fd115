"""`shoal upgrade`: this version takes over a cluster that is up, and no job is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Option, flag, number, verb

if TYPE_CHECKING:
    from shoal.control.upgrading import Part

AT_ONCE_MAX = 16


@verb(
    flag("--check", help="Only show which version runs where."),
    Option("--hosts", metavar="FILE", type=Path, help="Upgrade the hosts in this file over ssh."),
    Option(
        "--parallel",
        metavar="N",
        type=number(1, AT_ONCE_MAX),
        help=f"With --hosts: this many at a time, up to {AT_ONCE_MAX}. [1]",
    ),
    on_head=True,
)
def upgrade(
    check: bool, hosts: Path | None, parallel: int | None, json: bool, home: Path
) -> int | None:
    """Bring this version of Shoal to the cluster; jobs go on.

    Install the new version first (pip install -U shoal), then run this command.
    The head is replaced at once; it is away for a moment, and commands wait for
    it. Jobs and services go on. Then each node of this machine is replaced, one
    at a time, if nothing runs on it. A node where jobs run keeps its version,
    which works with the new head; run the command again when they have ended.

    --hosts then brings this version to the servers of a hosts file, which have
    joined with `shoal up --hosts`. Each node is cordoned. If nothing runs on it,
    this version is installed there, its agent is replaced, and the node is
    opened again. The first failure stops the command with exit code 1; hosts
    after it are not touched.

    On a machine that joined by hand, install the new version, then run
    `shoal upgrade` there while its node is cordoned (`shoal cordon`).

    Make a backup first (`shoal backup`): an older version cannot read what a
    newer one has written.

    Examples:
      shoal upgrade --check
      shoal backup before.tar && pip install -U shoal && shoal upgrade
      shoal upgrade --hosts hosts.yaml --check
      shoal upgrade --hosts hosts.yaml
      shoal upgrade --hosts hosts.yaml --parallel 4
    """
    from shoal.cli.screen import show
    from shoal.control.lifecycle import LifecycleError
    from shoal.forms.failure import USAGE, Failure

    if parallel is not None and hosts is None:
        raise Failure("--parallel: is for --hosts FILE; give both", USAGE)
    try:
        if hosts is not None:
            return _hosts(home, hosts, parallel or 1, check, json)
        parts = _here(home, check, json)
    except LifecycleError as error:
        raise Failure(str(error)) from None
    if json:
        show.as_json(parts)
        return None
    columns = [show.Column("PART"), show.Column("VERSION")]
    if not check:
        columns += [show.Column("STATE"), show.Column("WHY", wraps=True)]
    rows: list[list[str | show.Cell]] = [
        [one.part, one.version or "before 0.6", *(() if check else (one.state, one.why))]
        for one in parts
    ]
    show.table(columns, rows)
    return None


def _here(home: Path, check: bool, json: bool) -> list[Part]:
    """The head and its own nodes, or the nodes with which this machine joined."""
    from shoal.cli.screen import show
    from shoal.cli.up import membership
    from shoal.cli.up.hosts import joined_versions, upgrade_joined
    from shoal.control.home import Home
    from shoal.control.lifecycle import is_up
    from shoal.control.upgrading import upgrade, versions

    place = Home(home)
    joined = [] if is_up(place) else membership.here(place)
    if check:
        return joined_versions(joined) if joined else versions(place)
    with show.Spinner(quiet=json) as progress:
        return upgrade_joined(joined, progress) if joined else upgrade(place, progress)


def _hosts(home: Path, file: Path, at_once: int, check: bool, json: bool) -> int:
    from shoal.cli.errors import print_error
    from shoal.cli.screen import show
    from shoal.cli.up.hosts import HostsUpgrade, failure_text, show_hosts
    from shoal.control.home import Home
    from shoal.forms.failure import REFUSED

    results = HostsUpgrade(Home(home), file, at_once).run(check=check, quiet=json)
    if json:
        show.as_json(results)
    else:
        show_hosts(results, check=check)
    failed = failure_text(results, f"shoal upgrade --hosts {file}{' --check' if check else ''}")
    if failed:
        print_error(failed)
    return REFUSED if failed else 0
