"""People: tenant, user, whoami, oidc (how they sign in) and audit (what they did)."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, number, verb
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell
    from shoal.client import Client
    from shoal.model.identity import Role
    from shoal.model.people import AuditEntry


# Whether each action takes a name.
TENANT_ACTIONS = {"list": False, "add": True, "remove": True}
USER_ACTIONS = {"list": False, "add": True, "invite": True, "set": True, "remove": True}
UID_MAX = 2**31 - 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,62}")
NONE = "none"  # as a role: takes it away


@verb(
    Argument("action", "[list|add|remove]", "What to do. [list]", required=False, default="list"),
    Argument("name", "[NAME]", "The tenant, e.g. lab.", required=False),
    Option(
        "--uid",
        metavar="UID",
        type=number(1, UID_MAX),
        default=None,
        help="With add: the Unix user that its jobs run as. [the next free one from 61000]",
    ),
)
def tenant(action: str, name: str | None, uid: int | None, json: bool, home: Path) -> None:
    """List, add or remove tenants.

    A tenant is a team, a project or a customer. Its users see only its own jobs,
    services and secrets. Where the agents run as root, its jobs run as a Unix user
    of its own. Shares, quotas and budgets are the policy's: see shoal policy.

    A tenant with jobs or services cannot be removed. Its tokens, and its users'
    roles in it, are removed with it.

    Examples:
      shoal tenant add lab
      shoal tenant list
      shoal tenant remove lab
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    wanted = checked("tenant", TENANT_ACTIONS, action, name)
    if uid is not None and action != "add":
        raise Failure(f"--uid: only with add; write: shoal tenant {action} {wanted}".strip(), USAGE)
    with cluster.connect(home) as client:
        if action == "list":
            _list_tenants(client, json)
            return
        if action == "add":
            made = client.add_tenant(wanted, uid=uid or 0)
            there = {node.id: node.unenforced for node in client.nodes() if node.health != "lost"}
            text, warning = added_text(wanted, made.uid, there)
            if json:
                show.as_json(made)
        else:
            done = client.remove_tenant(wanted)
            text = f"removed the tenant {wanted}"
            if json:
                show.as_json(done)
    if not json:
        show.line(text, "green")
        if action == "add":
            if warning:
                show.note(warning)
            show.note(f"next: shoal user add NAME --tenant {wanted}")


def added_text(name: str, uid: int, unenforced: dict[str, list[str]]) -> tuple[str, str]:
    """What was done, and on which nodes the tenant's jobs are not kept apart."""
    from shoal.model.node import OF_TENANTS, unenforced_lines

    problems = {
        node: [text for text in found if text.startswith(OF_TENANTS)]
        for node, found in unenforced.items()
    }
    lines = unenforced_lines(problems)
    where = " where the agent is root" if lines else ""
    text = f"added the tenant {name}; its jobs run as the Unix user {uid}{where}"
    return text, f"not enforced {'; '.join(lines)}" if lines else ""


@verb(
    Argument(
        "action",
        "[list|add|invite|set|remove]",
        "What to do. [list]",
        required=False,
        default="list",
    ),
    Argument("name", "[NAME]", "The user, e.g. ann or ann@example.com.", required=False),
    Option("--tenant", "-t", metavar="NAME", help="The tenant that the role is in; '*' is all."),
    Option(
        "--role",
        metavar="ROLE",
        help="viewer, member or admin; with set also none. [member, with add]",
    ),
    Option("--expires", metavar="TIME", help="With invite: until when, at most 7d. [7d]"),
    flag("--end", help="With remove: cancel the user's jobs and stop the services."),
    Option("--heir", metavar="USER", default="", help="With remove: who gets the schedules."),
    flag("--yes", "-y", help="With remove: do not ask."),
)
def user(
    action: str,
    name: str | None,
    tenant: str | None,
    role: str | None,
    expires: str | None,
    end: bool,
    heir: str,
    yes: bool,
    json: bool,
    home: Path,
) -> None:
    """List, add, invite, change or remove users.

    A viewer looks, a member also runs jobs and services, and an admin may do
    everything, for every tenant. A user may have roles in several tenants: set
    adds or changes one of them, and --role none takes it away.

    A user signs in with a token (see shoal token) or accepts an invite: a link
    that is good once, for at most 7 days. Who does not exist yet is added.

    remove lists what the user leaves behind, and asks. Tokens and sign-ins end at
    once. Jobs and services continue, unless you say --end; schedules are paused,
    unless somebody gets them (--heir).

    Examples:
      shoal user add ann --tenant lab
      shoal user add bob --tenant lab --role viewer
      shoal user add carl --role admin
      shoal user invite dora --tenant lab
      shoal user set ann --tenant art --role viewer
      shoal user set ann --tenant lab --role none
      shoal user remove bob
      shoal user remove bob --end --heir ann --yes
    """
    from shoal.cli import cluster, people
    from shoal.cli.screen import show

    wanted = checked("user", USER_ACTIONS, action, name)
    if action in ("list", "remove") and (tenant or role):
        raise Failure(f"{action}: takes no --tenant and no --role; see: shoal user --help", USAGE)
    if action != "remove" and (end or heir or yes):
        raise Failure("--end, --heir and --yes: only with remove", USAGE)
    if expires and action != "invite":
        raise Failure("--expires: only with invite; for a token: shoal token add", USAGE)
    if action in ("add", "set"):
        where, what = _role(action, wanted, tenant, role)
    with cluster.connect(home) as client:
        if action == "list":
            _list_users(client, json)
            return
        if action == "remove":
            people.remove(client, wanted, end=end, heir=heir, ask=not yes, json=json)
            return
        if action == "invite":
            given = role_of(role) if role else None
            people.invite(client, wanted, tenant, given, expires, json, home)
            return
        if action == "add":
            assert what is not None, "it was checked above"
            made = client.add_user(wanted, {where: what})
        else:
            known = {one.name: one.roles for one in client.users()}
            roles = {k: v for k, v in known.get(wanted, {}).items() if k != where}
            made = client.set_user(wanted, {**roles, where: what} if what else roles)
    if json:
        show.as_json(made)
        return
    show.line(f"{wanted}: {roles_text(made.roles) or 'no role'}", "green")
    if action == "add":
        show.note(f"next: shoal user invite {wanted}, or shoal token add {wanted}")


@verb()
def whoami(json: bool, home: Path) -> None:
    """Show your user, tenant, role and token.

    Examples:
      shoal whoami
      shoal whoami --json | jq -r .tenant
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        me = client.me()
        now_ms = client.status().now_ms if me.until_ms else 0
    if json:
        show.as_json(me)
        return
    where = "every tenant" if me.tenant == "*" else me.tenant
    token = f", token {me.token}" if me.token else ""
    ends = f", which expires in {left_text(me.until_ms - now_ms)}" if me.until_ms else ""
    show.line(f"{me.user}: {me.role.value} in {where}{token}{ends}")


def checked(noun: str, actions: dict[str, bool], action: str, name: str | None) -> str:
    """The name, if the action is one, and has a name exactly when it needs one."""
    from shoal.forms import units

    if action not in actions:
        message = f"unknown command 'shoal {noun} {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(actions)}", USAGE)
    if actions[action] and not name:
        raise Failure(f"{action}: needs a name; see: shoal {noun} --help", USAGE)
    if name and not actions[action]:
        raise Failure(f"{action}: takes no name; write: shoal {noun} {action}", USAGE)
    given = (name or "").strip()
    if given and not _NAME.fullmatch(given):
        allowed = "letters, digits and . _ -" + (" @ +" if noun == "user" else "")
        message = f"NAME: {units.quoted(given)} is not the name of a {noun}"
        raise Failure(f"{message}; use at most 63 {allowed}", USAGE)
    return given


def role_of(text: str) -> Role:
    from shoal.forms import units
    from shoal.model.identity import Role

    try:
        return Role(text)
    except ValueError:
        message = f"--role: {units.quoted(text)} is not a role"
        raise Failure(f"{message}; use viewer, member or admin", USAGE) from None


def _role(action: str, name: str, tenant: str | None, role: str | None) -> tuple[str, Role | None]:
    """Where, and which; None takes it away."""
    from shoal.model.identity import EVERY_TENANT, Role

    if action == "set" and role is None:
        raise Failure("set: needs --role viewer, member, admin or none", USAGE)
    if action == "set" and role == NONE:
        if tenant is None:
            raise Failure(f"--tenant: where does {name} lose the role? '*' is all tenants", USAGE)
        return tenant, None
    wanted = role_of(role or Role.MEMBER.value)
    if tenant is None and wanted is not Role.ADMIN:
        example = f"shoal user {action} {name} --tenant lab"
        raise Failure(f"--tenant: a {wanted.value} needs one; write e.g. {example}", USAGE)
    return tenant or EVERY_TENANT, wanted


def roles_text(roles: dict[str, Role]) -> str:
    named = sorted(roles.items(), key=lambda item: (item[0] != "*", item[0]))
    return ", ".join(
        f"{role.value} in {'every tenant' if name == '*' else name}" for name, role in named
    )


def left_text(ms: int) -> str:
    """One unit: nobody plans a token's end by the minute."""
    from shoal.model.durations import about

    return about(ms)


def _list_tenants(client: Client, json: bool) -> None:
    from shoal.cli.screen import show

    views = client.tenants()
    if json:
        show.as_json(views)
        return
    if not views:
        show.note("no tenants: the cluster is yours alone; see: shoal tenant --help")
        return
    columns = [
        show.Column("TENANT"),
        show.Column("UNIX USER", right=True),
        show.Column("USERS", right=True),
        show.Column("JOBS", right=True),
        show.Column("ADDED"),
    ]
    rows: list[list[str | Cell]] = [
        [
            show.Cell(view.name, "bold"),
            str(view.uid),
            str(view.users),
            str(view.jobs),
            day_text(view.since_ms),
        ]
        for view in views
    ]
    show.table(columns, rows)


def _list_users(client: Client, json: bool) -> None:
    from shoal.cli.screen import show

    views = client.users()
    if json:
        show.as_json(views)
        return
    if not views:
        show.note("no users yet; add one with: shoal user add NAME --tenant TENANT")
        return
    columns = [
        show.Column("USER"),
        show.Column("ROLES", wraps=True),
        show.Column("TOKENS", right=True),
        show.Column("ADDED"),
    ]
    rows: list[list[str | Cell]] = [
        [
            show.Cell(view.name, "bold"),
            roles_text(view.roles),
            str(view.tokens),
            day_text(view.since_ms),
        ]
        for view in views
    ]
    show.table(columns, rows)


def day_text(ms: int) -> str:
    import datetime

    return f"{datetime.datetime.fromtimestamp(ms / 1000).astimezone():%Y-%m-%d}"


# `shoal oidc`: sign-in by OpenID Connect.


ACTIONS = {"show": False, "set": True, "remove": False}


@verb(
    Argument("action", "[show|set|remove]", "What to do. [show]", required=False, default="show"),
    Argument("file", "[FILE]", "With set: the settings.", required=False),
)
def oidc(action: str, file: str | None, json: bool, home: Path) -> None:
    """Show, set or remove single sign-on (OpenID Connect).

    People sign in at your provider (Keycloak, Okta, Entra ID, Google, ...) instead
    of with a token. Their groups there decide their tenants and roles here, at
    each sign-in. A sign-in lasts 8 hours. The file (.yaml, .toml or .json):

      issuer: https://login.example.com/realms/ai
      client_id: shoal
      client_secret: ...             # not for public clients
      user_claim: email              # the user's name; default preferred_username
      groups_claim: groups
      groups:
        vision-team: {tenant: vision}
        vision-guests: {tenant: vision, role: viewer}
        platform: {role: admin}

    At the provider register the redirect URI https://HEAD:7700/v1/oidc/callback,
    and allow the device flow for `shoal login --oidc`. The head needs the extra:
    pip install 'shoal[oidc]'.

    Examples:
      shoal oidc set provider.yaml
      shoal oidc
      shoal oidc remove
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.forms import units
    from shoal.forms.settings import read

    if action not in ACTIONS:
        message = f"unknown command 'shoal oidc {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(ACTIONS)}", USAGE)
    if bool(file) != ACTIONS[action]:
        fix = f"write: shoal oidc {action}{' FILE' if ACTIONS[action] else ''}"
        raise Failure(f"{action}: {'takes no file' if file else 'needs a file'}; {fix}", USAGE)
    wanted = read(file) if file else None
    with cluster.connect(home) as client:
        if action == "remove":
            done = client.remove_oidc()
            if json:
                show.as_json(done)
            else:
                show.line(f"sign-in through {done.id} is disabled", "green")
                left = "people who are signed in stay signed in for at most 8 hours"
                show.line(f"{left}; see: shoal token list")
            return
        view = client.set_oidc(wanted) if wanted is not None else client.oidc()
    if json:
        show.as_json(view)
        return
    if wanted is not None:
        show.line(f"{file} is in force: people sign in through {view.issuer}", "green")
    else:
        secret = " with a secret" if view.has_secret else ""
        show.line(f"people sign in through {view.issuer} (client {view.client_id}{secret})")
    rows = [
        [name, "every tenant" if rule.tenant == "*" else rule.tenant, rule.role.value]
        for name, rule in view.groups.items()
    ]
    show.table([show.Column(title) for title in ("GROUP", "TENANT", "ROLE")], rows)


# `shoal audit`: who did what, and is the log as it was written?


AUDIT_ACTIONS = ("show", "verify")
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
    """Show who did what, or verify the audit log.

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

    if action not in AUDIT_ACTIONS:
        message = f"unknown command 'shoal audit {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(AUDIT_ACTIONS)}", USAGE)
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
