"""`shoal token`: the tokens with which users sign in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, verb
from shoal.forms.failure import USAGE, Failure
from shoal.model.identity import Role

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell
    from shoal.client import Address, Client
    from shoal.model.people import SecretTokenView, TokenView

ACTIONS = ("list", "add", "rotate", "remove", "keys")
JOIN = "join"  # in place of an id: the cluster's join token
LIFETIME = "90d"
MISSING = 404
NEVER = "never"


@verb(
    Argument(
        "action",
        "[list|add|rotate|remove|keys]",
        "What to do. [list]",
        required=False,
        default="list",
    ),
    Argument("name", "[USER|ID]", "With add a user [you], else an id, or join.", required=False),
    Option(
        "--expires",
        metavar="TIME",
        help=f"When it ends: 8h, 30d or never. [{LIFETIME}; rotate: as before]",
    ),
    Option("--tenant", "-t", metavar="NAME", help="With add: the tenant. [the user's only one]"),
    Option("--role", metavar="ROLE", help="With add: viewer, member or admin. [the user's]"),
    Option("--note", metavar="TEXT", default="", help="With add: what it is for."),
)
def token(
    action: str,
    name: str | None,
    expires: str | None,
    tenant: str | None,
    role: str | None,
    note: str,
    json: bool,
    home: Path,
) -> None:
    """List, add, rotate or remove access tokens.

    A token acts for one user in one tenant. It is printed once and stored only as
    a hash. rotate gives a token another secret: the one before is void at once.
    Admins manage all tokens; you manage your own.

    Machines have keys instead (`shoal join`). keys lists the join tokens and the
    nodes' keys; rotate join replaces the cluster's join token, and nodes keep
    their keys; remove takes a key, too, and closes that node's link.

    Examples:
      shoal token add ann
      shoal token add ann --expires 8h --role viewer --note "the wall screen"
      shoal token add > ci.token
      shoal token list
      shoal token rotate 3f9a1c20
      shoal token remove 3f9a1c20
      shoal token keys
      shoal token rotate join
    """
    from shoal.cli import cluster

    _check_usage(action, name, bool(tenant or role or note), expires)
    lifetime_ms = _lifetime_ms(expires or (LIFETIME if action == "add" else None))
    with cluster.connect(home) as client:
        match action:
            case "list":
                _list(client, json)
            case "add":
                _add(client, name, lifetime_ms or 0, tenant, role, note, json, home)
            case "keys":
                _keys(client, json)
            case "rotate" if name == JOIN:
                _rotate_join(client, json)
            case "rotate":
                made = client.rotate_token(_id(name or ""), lifetime_ms=lifetime_ms)
                _show_secret(made, client, json, home)
            case _:
                _remove(client, _id(name or ""), json)


def _check_usage(action: str, name: str | None, described: bool, expires: str | None) -> None:
    from shoal.forms import units

    if action not in ACTIONS:
        message = f"unknown command 'shoal token {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(ACTIONS)}", USAGE)
    if action in ("rotate", "remove") and not name:
        raise Failure(f"{action}: needs the id of a token; see: shoal token list", USAGE)
    if action in ("list", "keys") and name:
        raise Failure(f"{action}: takes no name; write: shoal token {action}", USAGE)
    if name == JOIN and expires:
        raise Failure("--expires: a cluster's join token does not end; rotate it", USAGE)
    if described and action != "add":
        raise Failure("--tenant, --role and --note: only with add", USAGE)
    if expires and action not in ("add", "rotate"):
        raise Failure("--expires: only with add and rotate", USAGE)


def _id(text: str) -> str:
    """Whoever found a token may paste all of it: the secret part is not sent."""
    from shoal.forms import units

    found = text.strip()
    if found.startswith("shoal_"):
        found = found.split("_")[1]
    if not (found.isascii() and found.isalnum()):
        raise Failure(
            f"ID: {units.quoted(found)} is not a token's id; see: shoal token list", USAGE
        )
    return found


def _lifetime_ms(text: str | None) -> int | None:
    """0: it never ends. None: as it was."""
    from shoal.forms import units
    from shoal.model.people import LIFETIME_MS_MAX

    if text is None:
        return None
    if text.strip().lower() == NEVER:
        return 0
    try:
        lifetime_ms = units.duration_ms(text)
    except units.BadAmount as error:
        raise Failure(f"--expires: {error}; or never", USAGE) from None
    if not 0 < lifetime_ms <= LIFETIME_MS_MAX:
        raise Failure("--expires: must be between 1ms and 3650d, or never", USAGE)
    return lifetime_ms


def _add(
    client: Client,
    user: str | None,
    lifetime_ms: int,
    tenant: str | None,
    role: str | None,
    note: str,
    json: bool,
    home: Path,
) -> None:
    from shoal.cli.verbs.tenant import role_of
    from shoal.model.people import NewToken

    wanted = NewToken(
        user=user,
        tenant=tenant,
        role=role_of(role) if role else None,
        lifetime_ms=lifetime_ms,
        note=note,
    )
    _show_secret(client.add_token(wanted), client, json, home)


def _show_secret(made: SecretTokenView, client: Client, json: bool, home: Path) -> None:
    """The token alone on stdout, so that a script can keep it; the rest on stderr."""
    from shoal.cli.screen import show

    if json:
        show.as_json(made)
        return
    print(made.secret)
    show.note(f"this is the only time that the token is shown: {_gist(made.token, client)}")
    show.note(_next_step(made.token.user, home))


def _next_step(user: str, home: Path) -> str:
    """What the token's user types to sign in, which asks for the token."""
    _, line = login_from(home)
    if not line:
        reason = "only this machine reaches the cluster"
        return f"{reason}; open it to others with: shoal down, then shoal up --host 0.0.0.0"
    return f"next, on {user}'s machine: {line}"


def login_from(home: Path) -> tuple[Address, str]:
    """Where others find the cluster, and what they type there; empty if they do not reach it."""
    import os

    from shoal.cli.up.flags import login_address, login_line
    from shoal.client import Address, contexts, transport

    name = os.environ.get("SHOAL_CONTEXT", "")
    if name:
        context = contexts.find(name)
        shown = transport.fingerprint(context.certificate) if context.certificate else ""
        address = Address(url=context.url, pid=0, fingerprint=shown)
    else:
        address = login_address(home)
    return address, login_line(address) if address.url.startswith("https://") else ""


def _gist(view: TokenView, client: Client) -> str:
    from shoal.cli.verbs.tenant import left_text

    where = "every tenant" if view.tenant == "*" else view.tenant
    left = view.until_ms - client.status().now_ms
    ends = f"expires in {left_text(left)}" if view.until_ms else "does not expire"
    return f"{view.user}, {view.role.value} in {where}, {ends}"


def _remove(client: Client, token_id: str, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.client import ShoalError

    what = "token"
    try:
        done = client.remove_token(token_id)
    except ShoalError as error:
        admin = error.status == MISSING and client.me().role is Role.ADMIN
        if not admin or token_id not in {key.id for key in client.keys()}:  # noqa: SIM118
            raise
        done, what = client.remove_key(token_id), "key"
    if json:
        show.as_json(done)
    else:
        show.line(f"removed the {what} {token_id}; it no longer grants access", "green")


def _rotate_join(client: Client, json: bool) -> None:
    from shoal.cli.screen import show

    made = client.rotate_join_token()
    if json:
        show.as_json(made)
        return
    print(made.secret)
    show.note("this is the cluster's join token from now on; the nodes keep their keys")


def _keys(client: Client, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.cli.verbs.tenant import day_text, left_text

    views = client.keys()
    if json:
        show.as_json(views)
        return
    now_ms = client.status().now_ms
    rows: list[list[str | Cell]] = []
    for view in views:
        ends = f"in {left_text(view.until_ms - now_ms)}" if view.until_ms else NEVER
        rows.append(
            [
                show.Cell(view.id, "bold"),
                view.node or "(join token)",
                day_text(view.since_ms),
                show.Cell(f"void: {view.void}", "red") if view.void else ends,
                view.note,
            ]
        )
    titles = ("KEY", "NODE", "ADDED", "EXPIRES", "NOTE")
    show.table([show.Column(title, flexible=title == "NOTE") for title in titles], rows)


def _list(client: Client, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.cli.verbs.tenant import day_text, left_text

    views = client.tokens()
    if json:
        show.as_json(views)
        return
    if not views:
        show.note("no tokens yet; add one with: shoal token add USER")
        return
    now_ms = client.status().now_ms
    rows: list[list[str | Cell]] = []
    for view in views:
        ends = f"in {left_text(view.until_ms - now_ms)}" if view.until_ms else NEVER
        rows.append(
            [
                show.Cell(view.id, "bold"),
                view.user,
                "every tenant" if view.tenant == "*" else view.tenant,
                view.role.value,
                day_text(view.since_ms),
                show.Cell(f"void: {view.void}", "red") if view.void else ends,
                "invite, not accepted yet" if view.invite else view.note or view.only,
            ]
        )
    titles = ("TOKEN", "USER", "TENANT", "ROLE", "ADDED", "EXPIRES", "NOTE")
    show.table([show.Column(title, flexible=title == "NOTE") for title in titles], rows)
