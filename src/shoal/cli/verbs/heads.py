"""`shoal heads`: the machines that run a controller of this cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.model.views import HeadView

ACTIONS = ("list", "invite", "forget")


@verb(
    Argument("action", "[list|invite|forget]", "What to do. [list]", required=False),
    Argument("name", "[NAME]", "With forget: a head that will not come back.", required=False),
)
def heads(action: str | None, name: str | None, json: bool, home: Path) -> None:
    """List the heads of this cluster, or invite another one.

    A cluster that was started with `shoal up --database URL --shared DIR` can
    have several heads. One leads; the others follow it, and one of them takes
    over within seconds when it is lost. BEHIND is how many events a head does not
    know yet, SEEN when it last reported.

    invite prints what another machine needs to become a head. Whoever has this
    file can do everything in the cluster: carry it over ssh, and remove it after
    `shoal up --head FILE` there. forget takes a head off the list that will not
    come back.

    Examples:
      shoal heads
      shoal heads invite > head.json
      shoal up --head head.json --host 0.0.0.0   (on the other machine)
      shoal heads forget node7
    """
    action = action or "list"
    if action not in ACTIONS:
        text = f"ACTION: use {', '.join(ACTIONS[:-1])} or {ACTIONS[-1]}"
        raise Failure(f"{text}, not {action[:40]!r}", USAGE)
    if (name is not None) != (action == "forget"):
        raise Failure("NAME: give the name of one head with forget, and with nothing else", USAGE)
    if action == "invite":
        _invite(home)
    elif name is not None:
        _forget(name, json, home)
    else:
        _list(json, home)


def _list(json: bool, home: Path) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        found = client.heads()
    if json:
        show.as_json(found)
    elif not found:
        show.note("this cluster has one head and no database; see docs/several-heads.md")
    else:
        titles = ("HEAD", "URL", "VERSION", "STATE", "BEHIND", "SEEN")
        show.table([show.Column(title) for title in titles], [_row(one) for one in found])


def _row(head: HeadView) -> tuple[str, ...]:
    from shoal.model.durations import duration_text

    ago = "now" if head.seen_ms_ago < 5_000 else f"{duration_text(head.seen_ms_ago)} ago"
    behind = str(head.behind) if head.role != "leads" else ""
    return head.name, head.url, head.version, head.role, behind, ago


def _forget(name: str, json: bool, home: Path) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        client.forget_head(name)
    if json:
        show.as_json({"forgotten": name})
    else:
        show.line(f"{name} is no longer a head of this cluster")


def _invite(home: Path) -> None:
    """Only on a head: the keys are in its home."""
    import os
    import stat
    import sys

    import msgspec

    from shoal.client import Client
    from shoal.control.home import Home
    from shoal.control.invitation import KnownHead, invite

    place = Home(home)
    config = place.read_config()
    if config is None or not config.database:
        text = "this machine is not a head of a cluster with a database"
        raise Failure(f"{text}; start one with: shoal up --database URL --shared DIR")
    if sys.stdout.isatty():
        text = "invite prints the cluster's keys: write them to a file"
        raise Failure(f"{text}: shoal heads invite > head.json", USAGE)
    with Client.at_home(place.path) as client:
        known = tuple(KnownHead(one.name, one.url) for one in client.heads())
    made = invite(place, config, known)
    out = sys.stdout.fileno()
    if stat.S_ISREG(os.fstat(out).st_mode):
        os.fchmod(out, 0o600)
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(made)).decode() + "\n")
