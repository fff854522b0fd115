"""`shoal neighbor`: clusters that hand over jobs to each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, number, verb
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.client import Client
    from shoal.model.neighbor_views import NeighborView

# Whether each takes a name; that of `add` is a URL.
ACTIONS = {"list": False, "add": True, "remove": True, "invite": True, "revoke": True}
GPUS_MAX = 1_000_000
TITLES = ["CLUSTER", "GPUS", "FREE", "WAITING", "PRICE", "ROUND TRIP", "OURS", "VERSION", "STATE"]


@verb(
    Argument(
        "action", "[list|add|remove|invite|revoke]", "What to do.", required=False, default="list"
    ),
    Argument("name", "[NAME|URL]", "The neighbor, e.g. east; with add its URL.", required=False),
    Option("--token", metavar="TOKEN", help="With add: what it was invited with."),
    Option("--name", "called", metavar="NAME", help="With add: its name here. [from its URL]"),
    flag("--gone", help="With remove: it will never answer again; its jobs run elsewhere."),
    flag("--yes", "-y", help="With remove --gone: do not ask."),
    Option(
        "--gpus-max",
        metavar="N",
        type=number(1, GPUS_MAX),
        default=None,
        help="With invite: GPUs that its jobs may hold here at a time. [as before, or no limit]",
    ),
)
def neighbor(
    action: str,
    name: str | None,
    token: str | None,
    called: str | None,
    gone: bool,
    yes: bool,
    gpus_max: int | None,
    json: bool,
    home: Path,
) -> None:
    """Give jobs to other clusters, or take theirs.

    invite makes a tenant with the neighbor's name, a user of the same name, and a
    token that can only hand over jobs and follow them. The line that it prints is
    for the other cluster, and is shown once. Invite again for another token, or
    with --gpus-max for another cap.

    revoke ends all of its tokens at once. Its jobs run on: shoal cancel ends them.

    add takes that line: jobs of this cluster may then go there (shoal run
    --cluster). remove forgets a neighbor that has no job of ours. remove --gone
    declares that it will never answer again: it lists what that means, and asks.

    Examples:
      shoal neighbor invite east --gpus-max 16
      shoal neighbor add https://west.example.com:7700 --token shoal_1b...
      shoal neighbor list
      shoal neighbor remove west --gone
      shoal neighbor revoke east
    """
    from shoal.cli import cluster
    from shoal.cli.verbs.tenant import checked

    wanted = (name or "") if action == "add" else checked("neighbor", ACTIONS, action, name)
    for given, one, what in (
        (gpus_max, "invite", "--gpus-max: only with invite; the policy has it as gpus_max"),
        (token or called, "add", "--token and --name: only with add"),
        (gone or yes, "remove", "--gone and --yes: only with remove"),
    ):
        if given and action != one:
            raise Failure(what, USAGE)
    with cluster.connect(home) as client:
        match action:
            case "list":
                _list(client, json)
            case "add":
                _add(client, wanted, token, called, json)
            case "remove":
                _remove(client, wanted, gone=gone, ask=not yes, json=json)
            case "invite":
                _invite(client, wanted, gpus_max, json, home)
            case "revoke":
                _revoke(client, wanted, json)


def _add(client: Client, url: str, token: str | None, called: str | None, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.cli.verbs.login import name_of
    from shoal.model.neighbor_views import NewNeighbor
    from shoal.model.resources import plural

    if not url or not token:
        text = "run the line that the other cluster printed for: shoal neighbor invite"
        raise Failure(f"add: needs a URL and --token; {text}", USAGE)
    name = called or name_of(url)
    view = client.set_neighbor(name, NewNeighbor(url=url, token=token))
    if json:
        show.as_json(view)
        return
    offers = f"{plural(view.gpus, 'GPU')}, {view.gpus_free} of them free"
    show.line(f"{name} is a neighbor: it offers {offers}", "green")
    show.note(f"jobs go there with: shoal run --cluster {name} -- COMMAND")


def _remove(client: Client, name: str, *, gone: bool, ask: bool, json: bool) -> None:
    from shoal.cli.screen import show

    if gone:
        show.note(f"when {name} is declared gone:")
        for text in client.neighbor_gone(name).lines:
            show.note(f"  {text}")
        if ask and not show.at_keyboard():  # jobs may run twice: no script does that by chance
            raise Failure("--gone: nobody can be asked here; add --yes")
        if ask:
            show.agreed(f"declare {name} gone?")
    done = client.remove_neighbor(name, gone=gone)
    if json:
        show.as_json(done)
        return
    show.line(f"{name} is not a neighbor any more", "green")
    if done.note:
        show.note(done.note)


def _list(client: Client, json: bool) -> None:
    from shoal.cli.screen import show

    found = client.neighbors()
    if json:
        show.as_json(found)
    elif found:
        _print([[one.name, *_cells(one)] for one in found])
    else:
        show.note("there are no neighbors; the other cluster runs: shoal neighbor invite NAME")


def _print(rows: list[list[str]]) -> None:
    from shoal.cli.screen import show

    show.table([show.Column(title, wraps=title == "STATE") for title in TITLES], rows)


def _cells(one: NeighborView) -> list[str]:
    unheard = one.heard_ms_ago < 0
    price = f"{one.price:g} {one.currency}".strip() if one.price is not None else ""
    state = one.problem or ("not heard of yet" if unheard else "ok")
    if one.problem and not unheard:
        state += f" (last heard {one.heard_ms_ago // 1000} s ago)"
    trip = f"{one.round_trip_ms} ms" if one.round_trip_ms else ""
    counts = ["", "", ""] if unheard else [str(one.gpus), str(one.gpus_free), str(one.waiting)]
    return [*counts, price, trip, str(one.count), one.version, state]


@verb()
def clusters(json: bool, home: Path) -> None:
    """List this cluster and its neighbors: GPUs, queues, prices.

    GPUs of a neighbor are those that jobs of this cluster may have there. OURS is
    how many jobs of this cluster are there. PRICE is the lowest for a GPU and an
    hour.

    Examples:
      shoal clusters
      shoal clusters --json | jq '.[] | select(.gpus_free > 0) | .name'
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        own, others = client.status(), client.neighbors()
    gpus, free, waiting = own.gpus, own.gpus_free, own.jobs.get("waiting", 0)
    if json:
        here = {"name": "here", "gpus": gpus, "gpus_free": free, "waiting": waiting}
        show.as_json([{**here, "version": own.version}, *others])
        return
    here_cells = [str(gpus), str(free), str(waiting), "", "", "", own.version, "ok"]
    _print([["here", *here_cells], *([one.name, *_cells(one)] for one in others)])


def _invite(client: Client, name: str, gpus_max: int | None, json: bool, home: Path) -> None:
    """The cap comes first, so that nothing runs without it. Each part is made if it is missing."""
    from shoal.cli.screen import show
    from shoal.cli.verbs.token import login_from
    from shoal.model.identity import Role
    from shoal.model.people import NewToken
    from shoal.model.resources import plural

    missing = _missing(client, name)
    most = _capped(client, name, gpus_max)
    if "tenant" in missing:
        client.add_tenant(name)
    if "user" in missing:
        client.add_user(name, {name: Role.MEMBER})
    made = client.add_token(
        NewToken(user=name, tenant=name, role=Role.MEMBER, note="neighbor", only="neighbor")
    )
    address, line = login_from(home)
    pin = address.fingerprint.removeprefix("sha256:")
    token = f"{made.secret}.{pin}" if pin else made.secret
    if json:
        show.as_json({"name": name, "gpus_max": most, "url": address.url, "token": token})
        return
    may = (
        f"may hold {plural(most, 'GPU')} at a time" if most else "may use all GPUs; see: --gpus-max"
    )
    show.note(f"{name} {may}; on a head of {name}, run this, which is shown only once:")
    print(f"shoal neighbor add {address.url} --token {token}")
    if not line:
        reason = "only this machine reaches this cluster"
        show.note(f"{reason}; open it to others with: shoal down, then shoal up --host 0.0.0.0")


def _missing(client: Client, name: str) -> set[str]:
    """What there is not yet of the neighbor's tenant and user. Others have no part in them."""
    tenants = {view.name: view for view in client.tenants()}
    users = {view.name: view for view in client.users()}
    for kind, names in (("tenant", tenants), ("user", users)):
        for other in names:
            if other != name and other.casefold() == name.casefold():
                raise Failure(f"NAME: there is a {kind} {other}; choose another name", REFUSED)
    tenant, user = tenants.get(name), users.get(name)
    if user is not None and user.roles != {name: "member"}:
        raise Failure(f"NAME: there is a user {name}; choose another name", REFUSED)
    if tenant is not None and (tenant.users or tenant.jobs) and (user is None or tenant.users > 1):
        raise Failure(f"NAME: there is a tenant {name}; choose another name", REFUSED)
    return {kind for kind, found in (("tenant", tenant), ("user", user)) if found is None}


def _capped(client: Client, name: str, gpus_max: int | None) -> int:
    """The cap that is in force now; 0: none."""
    import msgspec

    from shoal.model.policy import Tenant, version_of

    policy = client.policy()
    before = next((one for one in policy.tenants if one.name == name), Tenant(name=name))
    if gpus_max is None or gpus_max == before.gpus_max:
        return before.gpus_max
    others = tuple(one for one in policy.tenants if one.name != name)
    after = msgspec.structs.replace(before, gpus_max=gpus_max)
    changed = msgspec.structs.replace(policy, tenants=(*others, after))
    client.set_policy(changed, expected=version_of(policy))
    return gpus_max


def _revoke(client: Client, name: str, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.model.resources import plural

    tokens = [one.id for one in client.tokens() if one.only == "neighbor" and one.tenant == name]
    if not tokens:
        raise Failure(f"NAME: no neighbor {name} has a token; see: shoal token list", REFUSED)
    for token in tokens:
        client.remove_token(token)
    if json:
        show.as_json({"name": name, "revoked": tokens})
        return
    show.line(f"revoked {plural(len(tokens), 'token')} of {name}", "green")
    show.note(f"its jobs run on; see: shoal ps --tenant {name}")
