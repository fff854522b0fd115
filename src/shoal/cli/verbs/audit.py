"""`shoal audit`: who did what, and is the log as it was written?"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, number, verb
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.model.audit import AuditEntry

ACTIONS = ("show", "verify")
ENTRIES_MAX = 10_000


@verb(
    Argument("action", "[show|verify]", "What to do. [show]", required=False, default="show"),
    Option("--user", metavar="NAME", default="", help="Only this user's requests."),
    Option("--tenant", "-t", metavar="NAME", default="", help="Only requests in this tenant."),
    Option("--verb", metavar="VERB", default="", help="Only these, e.g. jobs or jobs.cancel."),
    Option(
        "--last",
        "-n",
        metavar="N",
        type=number(1, ENTRIES_MAX),
        default=50,
        help="The newest N that match. [50]",
    ),
)
def audit(
    action: str, user: str, tenant: str, verb: str, last: int, json: bool, home: Path
) -> None:
    """Show who did what, or verify that the audit log is unchanged.

    The log has a line for each request that changed something, signed in or was
    refused: who, what, when, from where, and the outcome. The newest come first.
    Only admins see it. The log is kept in at most 8 files of 16 MiB; then the
    oldest file is removed.

    verify works on a head, from the files audit.log* in the home, or from the
    database, which then holds the newest 500,000 lines. Each line has
    a hash over itself and the line before. verify finds lines that were changed,
    removed or moved, and a log that was cut off. Whoever can write to the home can
    also make a whole new log: to exclude that, keep the printed hash elsewhere.

    Examples:
      shoal audit
      shoal audit --user ann -n 500
      shoal audit --verb jobs.cancel --json | jq -r .entries[].who
      shoal audit verify
    """
    from shoal.forms import units

    if action not in ACTIONS:
        message = f"there is no 'shoal audit {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(ACTIONS)}", USAGE)
    if action == "verify":
        if user or tenant or verb:
            raise Failure("verify: takes no filter; write: shoal audit verify", USAGE)
        _verify(home, json)
    else:
        _show(user, tenant, verb, last, json, home)


def _verify(home: Path, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.control.audit import AuditBroken
    from shoal.ports import StoreError

    try:
        first, newest = _checked(home)
    except AuditBroken as broken:
        raise Failure(f"the audit log is not as it was written: {broken}", REFUSED) from None
    except StoreError as error:
        raise Failure(str(error)) from None
    lines = newest.seq - first.seq + 1 if first and newest else 0
    if json:
        show.as_json({"lines": lines, "first": first, "newest": newest})
        return
    show.line(f"the audit log is unchanged: {lines:,} lines", "green")
    if first is not None and first.seq > 1:
        show.line(f"its oldest line is number {first.seq}; those before it were removed by size")
    if newest is not None:
        show.line(f"newest: number {newest.seq}, hash {newest.hash}")


def _checked(home: Path) -> tuple[AuditEntry | None, AuditEntry | None]:
    from shoal.control.audit import AUDIT_NAME, verify
    from shoal.control.home import Home

    config = Home(home).read_config()
    if config is not None and config.database:
        from shoal.control.audit_table import verify_table
        from shoal.database.postgres import PostgresDatabase

        database = PostgresDatabase(config.database)
        try:
            return verify_table(database)
        finally:
            database.close()
    path = home / AUDIT_NAME
    if not path.exists():
        raise Failure(f"there is no {path}; verify works on the head, in the cluster's home")
    return verify(path)


def _show(user: str, tenant: str, verb: str, last: int, json: bool, home: Path) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        view = client.audit(user=user, tenant=tenant, verb=verb, limit=last)
    if json:
        show.as_json(view)
        return
    if not view.entries:
        show.note("the audit log has no such entry")
        return
    rows: list[list[str | show.Cell]] = []
    for entry in view.entries:
        moment = datetime.datetime.fromtimestamp(entry.at_ms / 1000).astimezone()
        style = "" if entry.status < 400 else "red"
        more = f" (and {entry.skipped} more like it before)" if entry.skipped else ""
        rows.append(
            [
                f"{moment:%Y-%m-%d %H:%M:%S}",
                show.Cell(entry.who or "unknown", "bold"),
                "every tenant" if entry.tenant == "*" else entry.tenant,
                entry.verb,
                entry.on,
                show.Cell(f"{entry.outcome} ({entry.status}){more}", style),
                entry.source,
            ]
        )
    titles = ("WHEN", "WHO", "TENANT", "WHAT", "ON", "OUTCOME", "FROM")
    show.table([show.Column(title, flexible=title == "ON") for title in titles], rows)
