"""`shoal neighbor`: clusters that hand over jobs to each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, number, verb
from shoal.forms.failure import REFUSED, Failure

if TYPE_CHECKING:
    from shoal.client import Client

ACTIONS = {"invite": True, "revoke": True}  # whether each takes a name
GPUS_MAX = 1_000_000


@verb(
    Argument("action", "invite|revoke", "What to do."),
    Argument("name", "[NAME]", "The neighbor, e.g. east.", required=False),
    Option(
        "--gpus-max",
        metavar="N",
        type=number(1, GPUS_MAX),
        default=None,
        help="With invite: GPUs that its jobs may hold here at a time. [as before, or no limit]",
    ),
)
def neighbor(action: str, name: str | None, gpus_max: int | None, json: bool, home: Path) -> None:
    """Let another cluster hand over jobs to this one.

    invite makes a tenant with the neighbor's name, a user of the same name, and a
    token that can only hand over jobs and follow them. The line that it prints is
    for the other cluster, and is shown once. Invite again for another token, or
    with --gpus-max for another cap.

    revoke ends all of its tokens at once. Its jobs run on: shoal cancel ends them.

    Examples:
      shoal neighbor invite east --gpus-max 16
      shoal neighbor revoke east
    """
    from shoal.cli import cluster
    from shoal.cli.verbs.tenant import checked

    wanted = checked("neighbor", ACTIONS, action, name)
    if gpus_max is not None and action != "invite":
        raise Failure("--gpus-max: only with invite; the policy has it as gpus_max")
    with cluster.connect(home) as client:
        if action == "invite":
            _invite(client, wanted, gpus_max, json, home)
        else:
            _revoke(client, wanted, json)


def _invite(client: Client, name: str, gpus_max: int | None, json: bool, home: Path) -> None:
    """The cap comes first, so that nothing runs without it. Each part is made if it is missing."""
    from shoal.cli.screen import show
    from shoal.cli.verbs.token import login_from
    from shoal.model.identity import Role
    from shoal.model.people import NewToken

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
    may = f"may hold {most} GPUs at a time" if most else "may use all GPUs; see: --gpus-max"
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
