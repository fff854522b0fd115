"""`shoal oidc`: sign-in by OpenID Connect."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import Argument, verb
from shoal.forms.failure import USAGE, Failure

ACTIONS = {"show": False, "set": True, "remove": False}


@verb(
    Argument("action", "[show|set|remove]", "What to do. [show]", required=False, default="show"),
    Argument("file", "[FILE]", "With set: the settings.", required=False),
)
def oidc(action: str, file: str | None, json: bool, home: Path) -> None:
    """Show, set or remove the sign-in by OpenID Connect.

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
    from shoal.forms.oidc import read

    if action not in ACTIONS:
        message = f"there is no 'shoal oidc {units.quoted(action)[1:-1]}'"
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
                show.line(f"nobody can sign in through {done.id} any more", "green")
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
