"""`shoal notify` and `shoal secret`: what a user keeps with the cluster for all their jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, verb
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.cli.screen import show
    from shoal.client import Client
    from shoal.model.notice import ReceiverView, RulesView
    from shoal.model.secret import SecretView


# Each action with what it needs: nothing, a word, or perhaps a word.
ACTIONS = {"list": "", "add": "[WHAT=]WHERE", "remove": "RULE", "test": "RULE|WHERE", "key": ""}
SETTINGS = "settings"


@verb(
    Argument(
        "action",
        "[list|add|remove|test|key|settings]",
        "What to do. [list]",
        required=False,
        default="list",
    ),
    Argument("word", "[WORD]", "A rule, a receiver, or a file with settings.", required=False),
    flag("--everyone", help="With add: about the jobs of all users of your tenant."),
)
def notify(action: str, word: str | None, everyone: bool, json: bool, home: Path) -> None:
    """Send messages when something happens.

    A rule sends notices about your jobs. `shoal run --notify` asks for those of one
    job. WHAT is a list of:

      started        a job runs
      ended          a job has ended, however it ended [the default]
      failed         a job has failed or reached its time limit
      waiting:1h     a job has been waiting for this long
      budget         your tenant has used 80 % or all of its budget
      missed-run     a schedule could not run at its time
      node-lost      a node is lost (for admins)

    WHERE is a URL, which gets signed JSON (a webhook); slack:URL, for Slack and
    those that understand the same; or mail:ADDRESS. If the URL is a secret, keep it
    as one: @NAME and slack:@NAME take the URL from the secret NAME. A URL may also
    come from standard input: write - in its place.

    A receiver that does not answer is tried for about two hours, ever less often.
    An array sends one notice when all of it has ended.

    `key` prints the key with which webhooks verify who sent a notice. An admin
    sets the mail server with `settings FILE` (.yaml, .toml or .json):

      smtp: {host: mail.example.com, sender: shoal@example.com, port: 587,
             user: shoal, password: smtp-password}     # the name of a secret
      allow: [127.0.0.1/32]   # addresses of the head that tenants may name

    Examples:
      shoal notify add failed,waiting:1h=mail:me@example.com
      shoal secret set hook < url.txt && shoal notify add ended=slack:@hook
      shoal run --notify failed=@hook -- python train.py
      shoal notify
      shoal notify test r1
      shoal notify remove r1
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.forms import units

    if action not in (*ACTIONS, SETTINGS):
        message = f"unknown command 'shoal notify {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join((*ACTIONS, SETTINGS))}", USAGE)
    needs = ACTIONS.get(action, "")
    if action != SETTINGS and bool(word) != bool(needs):
        fix = f"write: shoal notify {action} {needs}".rstrip()
        raise Failure(f"{action}: {'needs more' if needs else 'takes nothing else'}; {fix}", USAGE)
    if everyone and action != "add":
        raise Failure("--everyone: is for shoal notify add", USAGE)
    with cluster.connect(home) as client:
        if action == "list":
            _show(client.rules(), json)
        elif action == SETTINGS:
            _settings(client, word, json)
        elif action == "key":
            key = client.notice_key()
            show.as_json(key) if json else show.line(key.key)
        elif action == "add":
            done = client.add_rule(_wish(word or ""), everyone=everyone)
            if json:
                show.as_json(done)
            else:
                show.line(
                    f"rule {done.id}: {done.note or 'added'}; try it: shoal notify test {done.id}"
                )
        elif action == "remove":
            done = client.remove_rule(word or "")
            show.as_json(done) if json else show.line(f"rule {done.id} is removed")
        else:
            _test(client, word or "", json)


def _wish(text: str) -> str:
    """A URL on the command line is seen by other users of this machine; one may be read instead."""
    from shoal.forms import readers
    from shoal.forms.failure import BadField
    from shoal.model.notice import wanted_of

    if text == "-" or text.endswith(("=-", "slack:-")):
        text = text[:-1] + sys.stdin.readline().strip()
    try:
        wanted_of(text)
    except (ValueError, BadField):
        raise Failure(f"WORD: cannot be read; {readers.WISH_FORMS}", USAGE) from None
    return text


def _test(client: Client, word: str, json: bool) -> None:
    from shoal.cli.screen import show

    done = client.test_rule(word if word.startswith("r") and word[1:].isdecimal() else _wish(word))
    if json:
        show.as_json(done)
    if done.note:
        raise Failure(f"{done.id}: not delivered: {done.note}", REFUSED)
    if not json:
        show.line(f"{done.id}: delivered", "green")


def _settings(client: Client, file: str | None, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.forms.settings import read_notices

    found = client.set_notice_settings(read_notices(file)) if file else client.notice_settings()
    if json:
        show.as_json(found)
        return
    smtp = found.smtp
    mail = f"{smtp.host}:{smtp.port} as {smtp.sender}" if smtp else "no mail server is set"
    show.line(f"mail: {mail}")
    show.line(f"allowed at the head: {', '.join(found.allow) or 'nothing'}")


def _show(found: RulesView, json: bool) -> None:
    from shoal.cli.screen import show

    if json:
        show.as_json(found)
        return
    if not found.rules and not found.others:
        show.note("no rules yet; add one: shoal notify add failed=WHERE; see --help")
        return
    titles = ("RULE", "OWNER", "WHAT", "WHERE", "SENT", "WAITING", "DROPPED", "LAST")
    columns = [show.Column(title) for title in titles]
    rows: list[list[str | show.Cell]] = []
    for rule in found.rules:
        what, equals, _ = rule.wish.removesuffix(rule.receiver.to).partition("=")
        about = what if equals else "ended"
        about += " (everyone)" if rule.everyone else ""
        rows.append([rule.id, rule.owner, about, *_cells(rule.receiver)])
    rows += [["-", "", "(of jobs)", *_cells(one)] for one in found.others]
    show.table(columns, rows)
    for one in [*(rule.receiver for rule in found.rules), *found.others]:
        if one.error:
            again = f"; tried again {_when(one.again_ms)}" if one.waiting else ""
            show.line(show.fitted(f"{one.to}: {one.error}{again}"), "yellow dim")


def _cells(one: ReceiverView) -> list[str | show.Cell]:
    last = "failing" if one.error else _when(one.delivered_ms) if one.delivered_ms else ""
    return [one.to, str(one.delivered), str(one.waiting), str(one.dropped), last]


def _when(at_ms: int) -> str:
    import time

    from shoal.forms.units import duration_text

    ago_ms = int(time.time() * 1000) - at_ms
    return f"{duration_text(ago_ms)} ago" if ago_ms >= 0 else f"in {duration_text(-ago_ms)}"


# `shoal secret`: set, list and remove what jobs need and nobody may read.


SECRET_ACTIONS = ("set", "list", "remove")


@verb(
    Argument("action", "[set|list|remove]", "What to do. [list]", required=False, default="list"),
    Argument("name", "[NAME]", "The secret's name.", required=False),
    Option("--file", metavar="FILE", help="Read the value from this file. [standard input]"),
    Option("--tenant", metavar="NAME", help="Whose secret it is. [your own]", default=""),
)
def secret(
    action: str, name: str | None, file: str | None, tenant: str, json: bool, home: Path
) -> None:
    """Set, list or remove secrets for your jobs.

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

    if action not in SECRET_ACTIONS:
        message = f"unknown command 'shoal secret {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(SECRET_ACTIONS)}", USAGE)
    if bool(name) != (action != "list"):
        fix = f"write: shoal secret {action}{' NAME' if action != 'list' else ''}"
        raise Failure(f"{action}: {'takes no name' if name else 'needs a name'}; {fix}", USAGE)
    if file and action != "set":
        raise Failure(f"--file: is for shoal secret set, not for {action}", USAGE)
    checked = _name(name) if name else ""
    value = _value(checked, file) if action == "set" else b""
    with cluster.connect(home) as client:
        if action == "list":
            _show_secrets(client.secrets(tenant=tenant), json)
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


def _show_secrets(found: list[SecretView], json: bool) -> None:
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
