"""`shoal key`: the keys with which programs call services."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, number, verb
from shoal.forms.failure import USAGE, Failure
from shoal.model.identity import Per

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell
    from shoal.client import Client
    from shoal.model.people import ApiKeyView, NewApiKey

ACTIONS = ("list", "add", "revoke")
UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
NEVER = "never"


@verb(
    Argument("action", "[list|add|revoke]", "What to do. [list]", required=False, default="list"),
    Argument(
        "names",
        "[SERVICE...|ID]",
        "With add its services, else all of the tenant's; with list one of them; with revoke the"
        " id.",
        nargs=-1,
    ),
    Option("--for", "user", metavar="USER", help="With add: who gets it. [you]"),
    Option("--tokens", metavar="N/PERIOD", help="With add: tokens, e.g. 1M/day or 20M/month."),
    Option("--rpm", metavar="N", type=number(1), help="With add: requests per minute."),
    Option("--expires", metavar="TIME", help=f"With add: when it ends: 30d or never. [{NEVER}]"),
    Option("--tenant", "-t", metavar="NAME", help="With add: the tenant. [that of the services]"),
)
def key(
    action: str,
    names: tuple[str, ...],
    user: str | None,
    tokens: str | None,
    rpm: int | None,
    expires: str | None,
    tenant: str | None,
    json: bool,
    home: Path,
) -> None:
    """List, add or revoke keys for calling services.

    A key is for services of one tenant, and for nothing else in the cluster. A
    program sends it as an OpenAI client sends its API key. It is printed once, and
    stored only as a hash. The gateway refuses a key that was revoked within a
    second. Members of the tenant that owns a service manage its keys, and admins
    manage all.

    A service asks for keys with `shoal serve --access cluster`; services of added
    tenants do unless they are open.

    Examples:
      shoal key add chat --for ann --tokens 1M/day --rpm 60
      shoal key add chat code --expires 30d > app.key
      shoal key list
      shoal key list chat
      shoal key revoke 3f9a1c20b4d5
    """
    from shoal.cli import cluster
    from shoal.cli.verbs.token import _lifetime_ms
    from shoal.model.people import NewApiKey

    given = (user, tokens, rpm, expires, tenant)
    _check_usage(action, names, described=any(one is not None for one in given))
    with cluster.connect(home) as client:
        match action:
            case "list":
                _list(client, names[0] if names else "", json)
            case "add":
                count, per = _tokens(tokens) if tokens else (0, Per.DAY)
                wanted = NewApiKey(
                    services=names,
                    user=user,
                    tenant=tenant,
                    tokens=count,
                    per=per,
                    rpm=rpm or 0,
                    lifetime_ms=_lifetime_ms(expires) or 0,
                )
                _add(client, wanted, json)
            case _:
                _revoke(client, _id(names[0]), json)


def _check_usage(action: str, names: tuple[str, ...], *, described: bool) -> None:
    from shoal.forms import units
    from shoal.forms.readers import service_name

    if action not in ACTIONS:
        message = f"unknown command 'shoal key {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(ACTIONS)}", USAGE)
    if action == "revoke" and len(names) != 1:
        raise Failure("revoke: needs the id of a key; see: shoal key list", USAGE)
    if action == "list" and len(names) > 1:
        raise Failure("list: takes one service; write: shoal key list SERVICE", USAGE)
    if described and action != "add":
        raise Failure("--for, --tokens, --rpm, --expires and --tenant: only with add", USAGE)
    if action != "revoke":
        for name in names:
            service_name("SERVICE", name)


def _tokens(text: str) -> tuple[int, Per]:
    """'1M/day', '500k/month'."""
    from shoal.forms import units

    found = re.fullmatch(
        r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([kmg]?)/(day|month)", text.strip().lower()
    )
    count = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if found is None or not 0 < count <= 10**15:
        fix = "write e.g. 1M/day or 20M/month"
        raise Failure(f"--tokens: {units.quoted(text)} is no number of tokens; {fix}", USAGE)
    return count, Per(found[3])


def _id(text: str) -> str:
    """Whoever found a key may paste all of it: the secret part is not sent."""
    from shoal.forms import units

    parts = text.strip().split("_")
    found = parts[1] if len(parts) > 2 else parts[0]
    if not (found.isascii() and found.isalnum()):
        raise Failure(f"ID: {units.quoted(found)} is not a key's id; see: shoal key list", USAGE)
    return found


def _add(client: Client, wanted: NewApiKey, json: bool) -> None:
    """The key alone on stdout, so that a script can keep it; the rest on stderr."""
    from shoal.cli.screen import show

    made = client.add_api_key(wanted)
    if json:
        show.as_json(made)
        return
    print(made.secret)
    view = made.key
    show.note(f"this is the only time that the key is shown: {view.user}, {_for(view)}")
    for name in view.services[:1]:
        url = next((one.url for one in client.services() if one.name == name), "")
        if url:
            show.note(f"next: curl -H 'Authorization: Bearer KEY' {url}v1/models")


def _for(view: ApiKeyView) -> str:
    return ", ".join(view.services) or f"all services of {view.tenant}"


def _revoke(client: Client, key_id: str, json: bool) -> None:
    from shoal.cli.screen import show

    done = client.revoke_api_key(key_id)
    if json:
        show.as_json(done)
    else:
        show.line(f"revoked the key {key_id}; the gateway refuses it within a second", "green")


def _list(client: Client, service: str, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.cli.verbs.tenant import day_text, left_text

    views = client.api_keys(service=service)
    if json:
        show.as_json(views)
        return
    if not views:
        show.note("no keys yet; add one with: shoal key add SERVICE")
        return
    now_ms = client.status().now_ms
    rows: list[list[str | Cell]] = []
    for view in views:
        ends = f"in {left_text(view.until_ms - now_ms)}" if view.until_ms else NEVER
        rows.append(
            [
                show.Cell(view.id, "bold"),
                view.user,
                _for(view),
                f"{view.tokens:,}/{view.per.value}" if view.tokens else "-",
                f"{view.rpm}/min" if view.rpm else "-",
                day_text(view.since_ms),
                show.Cell(f"void: {view.void}", "red") if view.void else ends,
            ]
        )
    titles = ("KEY", "USER", "SERVICES", "TOKENS", "REQUESTS", "ADDED", "EXPIRES")
    show.table([show.Column(title, flexible=title == "SERVICES") for title in titles], rows)
