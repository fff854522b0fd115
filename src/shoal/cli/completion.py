"""Shell completion: verbs and flags at once, names from the cluster if it answers quickly.

Nothing here may print into the shell: whatever goes wrong, there are no suggestions.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

if TYPE_CHECKING:
    from shoal.client import Client

VARIABLE = "_SHOAL_COMPLETE"  # the script that a shell loads sets it
SHELLS = ("bash", "zsh", "fish")
NAMES_S_MAX = 0.5
JOBS_MAX = 200
# A head that we do not trust must not write to the terminal or into the shell.
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")
ACTIONS = re.compile(r"\[?([a-z]+(?:\|[a-z]+)+)\]?(?:\.\.\.)?")
FILES, FOLDERS = ("FILE", "PEM", "CSV", "TRACE", "INPUTS", "OUTPUT"), ("DIR",)

Item = CompletionItem[str]
Named = Iterable[tuple[str, str]]  # a name, and what a shell shows beside it
Source = Callable[["Client"], Named]


def _live(client: Client) -> Named:
    return [(job.id, f"{job.name} {job.state}".strip()) for job in client.jobs(limit=JOBS_MAX)]


def _jobs(client: Client) -> Named:
    jobs = client.jobs(finished=True, limit=JOBS_MAX)
    return [(job.id, f"{job.name} {job.state}".strip()) for job in jobs]


def _services(client: Client) -> Named:
    return [(service.name, service.state) for service in client.services()]


def _both(client: Client) -> Named:
    return [*_jobs(client), *_services(client)]


def _nodes(client: Client) -> Named:
    return [(node.id, str(node.state)) for node in client.nodes()]


def _tenants(client: Client) -> Named:
    return [(tenant.name, "") for tenant in client.tenants()]


def _users(client: Client) -> Named:
    return [(user.name, "") for user in client.users()]


def _tokens(client: Client) -> Named:
    return [(token.id, token.user) for token in client.tokens()]


def _secrets(client: Client) -> Named:
    return [(secret.name, "") for secret in client.secrets()]


def _labels(client: Client) -> Named:
    pairs = {f"{key}={value}" for node in client.nodes() for key, value in node.labels.items()}
    return [(pair, "") for pair in sorted(pairs)]


def _label_names(client: Client) -> Named:
    return [(key, "") for key in sorted({key for node in client.nodes() for key in node.labels})]


def _taints(client: Client) -> Named:
    return [(taint, "") for taint in sorted({t for node in client.nodes() for t in node.taints})]


# By verb and argument; options by their name alone.
ARGUMENTS: dict[tuple[str, str], Source] = {
    ("logs", "jobs"): _both,
    ("exec", "words"): _live,
    ("attach", "job"): _live,
    ("forward", "words"): _live,
    ("ls", "job"): _jobs,
    ("workflow", "workflow"): _jobs,
    ("note", "job"): _jobs,
    ("why", "job"): _both,
    ("explain", "job"): _jobs,
    ("cancel", "jobs"): _live,
    ("requeue", "jobs"): _jobs,
    ("retry", "jobs"): _jobs,
    ("sleep", "jobs"): _live,
    ("wake", "jobs"): _live,
    ("service", "name"): _services,
    ("serve", "words"): _services,
    ("cordon", "nodes"): _nodes,
    ("drain", "nodes"): _nodes,
    ("uncordon", "nodes"): _nodes,
    ("check", "nodes"): _nodes,
    ("label", "words"): _nodes,
    ("taint", "words"): _nodes,
    ("tenant", "name"): _tenants,
    ("user", "name"): _users,
    ("token", "name"): _tokens,
    ("secret", "name"): _secrets,
}
FIRST = ("serve", "exec", "forward")  # only the first word is a name
OPTIONS: dict[str, Source] = {
    "where": _labels,
    "spread": _label_names,
    "together": _label_names,
    "tolerates": _taints,
    "job": _jobs,
    "node": _nodes,
    "tenant": _tenants,
    "user": _users,
    "secret": _secrets,
}


def script(shell: str) -> str:
    """What a shell loads. Click would start bash to ask for its version, and print about it."""
    made = get_completion_class(shell)
    assert made is not None
    completion = made(click.Group("shoal"), {}, "shoal", VARIABLE)
    return completion.source_template % completion.source_vars()


def answer(group: click.Group, asked: str) -> int:
    """Prints the suggestions that a shell's script asks for, e.g. with `bash_complete`."""
    shell, _, what = asked.partition("_")
    made = get_completion_class(shell)
    if made is None or what != "complete":
        return 1
    with contextlib.suppress(Exception), open(os.devnull, "w") as nothing:
        with contextlib.redirect_stderr(nothing):
            print(made(group, {}, "shoal", VARIABLE).complete())
        sys.stdout.flush()
    return 0


def suggest(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[Item]:
    """For the value of one parameter."""
    if parameter.name == "context" or (context.info_name, parameter.name) == ("context", "names"):
        return _matching([(name, "") for name in _contexts()], incomplete)
    source = _source(context, parameter)
    if source is not None:
        return _matching(_asked(context, source), incomplete)
    metavar = str(parameter.metavar or "")
    actions = ACTIONS.fullmatch(metavar)
    if actions:
        return _matching([(word, "") for word in actions[1].split("|")], incomplete)
    if metavar.strip("[].") in FOLDERS:
        return [Item(incomplete, type="dir")]
    if isinstance(parameter, click.Argument) or metavar.strip("[].") in FILES:
        return [Item(incomplete, type="file")]
    return []


def _source(context: click.Context, parameter: click.Parameter) -> Source | None:
    verb, name = context.info_name or "", parameter.name or ""
    if isinstance(parameter, click.Option):
        return OPTIONS.get(name)
    if (verb, name) == ("token", "name") and context.params.get("action") == "add":
        return _users
    if verb in FIRST and context.params.get("words"):
        return None  # its command or its ports
    return ARGUMENTS.get((verb, name))


def _matching(names: Named, incomplete: str) -> list[Item]:
    return [
        Item(name, help=text if text.isprintable() else None)
        for name, text in names
        if name.startswith(incomplete) and SAFE.fullmatch(name)
    ]


def _contexts() -> list[str]:
    from shoal.client import contexts

    return [*contexts.load().contexts, contexts.LOCAL]


def _asked(context: click.Context, source: Source) -> Named:
    """In a thread, because looking a host up may take longer than anyone waits for a suggestion."""
    found: list[tuple[str, str]] = []

    def ask() -> None:
        from shoal.cli.cluster import context_in_use
        from shoal.cli.command import settle
        from shoal.client import Client, default_home

        with contextlib.suppress(Exception):
            settle(context, on_head=False)
            used = context_in_use()
            home = None if used else default_home()
            client = Client(context=used, home=home, timeout_s=NAMES_S_MAX, patience_s=0)
            with client:
                found.extend(source(client))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(2 * NAMES_S_MAX)  # including the time to load the client
    return found
