"""`shoal secret`: set, list and remove what jobs need and nobody may read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.model.secret import SecretView

ACTIONS = ("set", "list", "remove")


@verb(
    Argument("action", "[set|list|remove]", "What to do. [list]", required=False, default="list"),
    Argument("name", "[NAME]", "The secret's name.", required=False),
    Option("--file", metavar="FILE", help="Read the value from this file. [standard input]"),
    Option("--tenant", metavar="NAME", help="Whose secret it is. [your own]", default=""),
)
def secret(
    action: str, name: str | None, file: str | None, tenant: str, json: bool, home: Path
) -> None:
    """Set, list or remove the secrets of your jobs.

    The value comes from standard input, from a file, or from a prompt that does not
    show it; never from the command line, which others can see. It is kept encrypted.
    No command shows it again. Jobs get it if they ask for it with --secret.

    Setting a secret again is a new version. Members that start from then on get it;
    running ones keep what they have.

    Examples:
      shoal secret set hf-token                    asks for the value
      shoal secret set deploy-key < id_ed25519
      shoal run --secret hf-token=HF_TOKEN -- python train.py
      shoal run --secret deploy-key -- sh -c 'ssh -i $SHOAL_SECRETS/deploy-key host'
      shoal secret list
      shoal secret remove hf-token
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.forms import units

    if action not in ACTIONS:
        message = f"there is no 'shoal secret {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(ACTIONS)}", USAGE)
    if bool(name) != (action != "list"):
        fix = f"write: shoal secret {action}{' NAME' if action != 'list' else ''}"
        raise Failure(f"{action}: {'takes no name' if name else 'needs a name'}; {fix}", USAGE)
    if file and action != "set":
        raise Failure(f"--file: is for shoal secret set, not for {action}", USAGE)
    checked = _name(name) if name else ""
    value = _value(checked, file) if action == "set" else b""
    with cluster.connect(home) as client:
        if action == "list":
            _show(client.secrets(tenant=tenant), json)
        elif action == "set":
            made = client.set_secret(checked, value, tenant=tenant)
            if json:
                show.as_json(made)
            else:
                show.line(f"{made.name} is set: version {made.version}", "green")
        else:
            done = client.remove_secret(checked, tenant=tenant)
            if json:
                show.as_json(done)
            else:
                show.line(f"{checked} is removed; members that have it keep it until they end")


def _name(text: str) -> str:
    """A value that was put on the command line by mistake must not be repeated in an error."""
    import re

    from shoal.model.job import SECRET_PATTERN

    if "=" in text:
        raise Failure(
            "NAME: give the value on standard input, not as NAME=VALUE; others may have "
            "seen it in the list of processes",
            USAGE,
        )
    if not re.fullmatch(SECRET_PATTERN, text):
        rule = "begins with a letter, and has at most 63 letters, digits, '.', '_' and '-'"
        raise Failure(f"NAME: {rule}", USAGE)
    return text


def _value(name: str, file: str | None) -> bytes:
    from shoal.model.secret import SECRET_BYTES_MAX

    if file is None and sys.stdin.isatty():
        from getpass import getpass

        value = getpass(f"value of {name}: ").encode("utf-8", "surrogateescape")
    elif file is None:
        value = sys.stdin.buffer.read(SECRET_BYTES_MAX + 1)
    else:
        try:
            with open(file, "rb") as opened:
                value = opened.read(SECRET_BYTES_MAX + 1)
        except OSError as error:
            raise Failure(f"--file: cannot read {file}: {error.strerror}", USAGE) from None
    if not value:
        raise Failure("the value is empty; give it on standard input", USAGE)
    if len(value) > SECRET_BYTES_MAX:
        raise Failure(f"the value is longer than {SECRET_BYTES_MAX // 1024} KiB", USAGE)
    return value


def _show(found: list[SecretView], json: bool) -> None:
    import time

    from shoal.cli.screen import show

    if json:
        show.as_json(found)
        return
    if not found:
        show.note("no secrets are set; see: shoal secret --help")
        return
    columns = [
        show.Column("NAME"),
        show.Column("VERSION", right=True),
        show.Column("SET"),
        show.Column("BY"),
        show.Column("LIVE JOBS", right=True),
    ]
    rows: list[list[str | show.Cell]] = []
    for one in found:
        at = time.strftime("%Y-%m-%dT%H:%M", time.localtime(one.set_ms / 1000))
        when = show.Cell(at, pretty=at.replace("T", " "))
        rows.append([one.name, str(one.version), when, one.by, str(one.jobs)])
    show.table(columns, rows)
    for one in found:
        if one.problem:
            show.note(f"{one.name}: {one.problem}")
