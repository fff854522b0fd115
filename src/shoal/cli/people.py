"""Inviting a user, and removing one with what the user leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.model.identity import Role
    from shoal.model.people import LeavingView


def invite(
    client: Client,
    user: str,
    tenant: str | None,
    role: Role | None,
    expires: str | None,
    json: bool,
    home: Path,
) -> None:
    """The link alone on stdout, so that a script can send it; the rest on stderr."""
    from shoal.cli.screen import show
    from shoal.cli.verbs.token import login_from
    from shoal.forms import units
    from shoal.model.durations import about
    from shoal.model.identity import INVITE_MS_MAX
    from shoal.model.people import NewInvite

    lifetime_ms = INVITE_MS_MAX
    if expires is not None:
        try:
            lifetime_ms = units.duration_ms(expires)
        except units.BadAmount as error:
            raise Failure(f"--expires: {error}", USAGE) from None
    if not 0 < lifetime_ms <= INVITE_MS_MAX:
        raise Failure("--expires: an invite ends within 7d; write e.g. --expires 3d", USAGE)
    made = client.invite(NewInvite(user=user, tenant=tenant, role=role, lifetime_ms=lifetime_ms))
    if json:
        show.as_json(made)
        return
    address, line = login_from(home)
    print(f"{address.url}/#invite={made.code}")
    where = "every tenant" if made.token.tenant == "*" else made.token.tenant
    gist = f"{made.token.user}, {made.token.role.value} in {where}, within {about(lifetime_ms)}"
    show.note(f"this link is good once, and is shown only now: {gist}")
    if line:
        show.note(f"or in a terminal, with what follows #invite= as the token: {line}")
    else:
        show.note("only this machine reaches the cluster; open it with: shoal up --host 0.0.0.0")


def remove(client: Client, user: str, *, end: bool, heir: str, ask: bool, json: bool) -> None:
    from shoal.cli.screen import show

    if ask and not json and sys.stdin.isatty():
        view = client.leaving(user, end=end, heir=heir)
        show_left(view, f"{user} leaves behind:")
        show.agreed(f"remove {user}?")
    done = client.remove_user(user, end=end, heir=heir)
    if json:
        show.as_json(done)
        return
    if not (ask and sys.stdin.isatty()):
        show_left(done, "")
    show.line(f"removed the user {user} and all tokens of {user}", "green")


def show_left(view: LeavingView, title: str) -> None:
    from shoal.cli.screen import show

    if title:
        show.line(title)
    if not view.left:
        show.note("nothing: no jobs, services, schedules, tokens, notices or secrets")
        return
    rows = [
        [one.kind, one.id, one.name, "every tenant" if one.tenant == "*" else one.tenant, one.then]
        for one in view.left
    ]
    titles = ("KIND", "ID", "NAME", "TENANT", "THEN")
    show.table([show.Column(one, flexible=one == "NAME") for one in titles], rows)
    if view.more:
        show.note(f"and {view.more:,} more")
