"""`shoal policy`: see, check, compare and change the rules by which jobs are placed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.model.policy import Policy

# How many policies each takes, at least and at most.
ACTIONS = {"show": (0, 1), "check": (1, 1), "diff": (1, 2), "set": (1, 1)}

SUMMARIES = {
    "fifo": "First come, first served: nobody overtakes, nobody is stopped for another.",
    "backfill": "As fifo, but gaps are filled where that delays nobody at the front.",
    "fair": "Tenants share by quota and weight; gaps are filled; priority preempts.",
    "srtf": "Shortest remaining time first, by the jobs' estimates; a yardstick.",
    "srsf": "Shortest remaining time x GPUs first, by the estimates; a yardstick.",
    "tiresias": "Least attained service first, in three levels; needs no estimates.",
}


def policy(
    action: Annotated[
        str, typer.Argument(metavar="[show|check|diff|set]", help="What to do. [show]")
    ] = "show",
    policies: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|FILE]...", help="A shipped one, or a file. [in force]"),
    ] = None,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="show: list those that come with Shoal.")
    ] = False,
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Show, check, compare or change the scheduling policy.

    show prints a policy as a file, the one in force if none is named. check
    reads a file as the controller would. diff tells where two differ; with
    one it compares it with the one in force. set puts one in force at once;
    jobs that run go on.

    A file (.yaml, .toml or .json) says what differs from its base:

      base: fair
      patience: 30m            # times as 90s, 10m, 7d
      tenants:
        research: {weight: 2, quota_gpus: 32}
        vision: {parent: research, quota_gpus: 16}

    order and placement may name functions of your own, as module:name. The
    controller finds the module on the PYTHONPATH that it had at `shoal up`
    (full paths), and reads it once; examples/policies shows how.

    Examples:
      shoal policy
      shoal policy show --shipped
      shoal policy show fair > mine.yaml
      shoal policy check mine.yaml
      shoal policy diff mine.yaml
      shoal policy set mine.yaml
    """
    named = policies or []
    _check_usage(action, named, shipped)
    if shipped:
        _print_shipped(json)
    elif action == "show":
        _show(_in_force(home) if not named else _named(named[0], load=False), json)
    elif action == "check":
        _check(named[0], json)
    elif action == "diff":
        first = _in_force(home) if len(named) == 1 else _named(named[0], load=False)
        left = "IN FORCE" if len(named) == 1 else named[0]
        _diff(first, _named(named[-1], load=False), left, named[-1], json)
    else:
        _set(_named(named[0], load=False), home, json)


def _check_usage(action: str, named: list[str], shipped: bool) -> None:
    from shoal.forms import units

    if action not in ACTIONS:
        message = f"there is no 'shoal policy {units.quoted(action)[1:-1]}'"
        raise Failure(f"{message}; use one of {', '.join(ACTIONS)}", USAGE)
    if shipped and (action != "show" or named):
        raise Failure("--shipped: lists policies; write: shoal policy show --shipped", USAGE)
    least, most = ACTIONS[action]
    if len(named) < least:
        raise Failure(f"{action}: name a policy or a file; see: shoal policy --help", USAGE)
    if len(named) > most:
        extra = units.quoted(named[most])
        raise Failure(f"{action}: {extra} is one too many; see: shoal policy --help", USAGE)


def _named(word: str, *, load: bool) -> Policy:
    from shoal.forms.policy import find

    return find(word, load=load)


def _in_force(home: Path) -> Policy:
    from shoal.cli import reach

    with reach.connect(home) as client:
        return client.policy()


def _show(one: Policy, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.forms.policy import to_text

    if json:
        show.as_json(one)
        return
    for text in to_text(one).splitlines():
        show.line(text)


def _print_shipped(json: bool) -> None:
    from shoal.cli.screen.show import Cell, Column, as_json, table
    from shoal.core.policies import SHIPPED

    if json:
        as_json(list(SHIPPED.values()))
        return
    columns = [Column("NAME"), Column("WHAT IT DOES", wraps=True)]
    table(columns, [[Cell(name, "bold"), SUMMARIES.get(name, "")] for name in SHIPPED])


def _check(word: str, json: bool) -> None:
    from shoal.cli.screen import show

    one = _named(word, load=True)
    if json:
        show.as_json(one)
    else:
        show.line(f"{word} is fine: {gist(one)}", "green")


def _diff(one: Policy, other: Policy, left: str, right: str, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.forms.policy import differences

    rows = differences(one, other)
    if json:
        show.as_json([{"field": field, "from": a, "to": b} for field, a, b in rows])
    elif rows:
        titles = [show.Column(title) for title in ("FIELD", left, right)]
        show.table(titles, [list(row) for row in rows])
    else:
        show.note("they are the same")


def _set(wanted: Policy, home: Path, json: bool) -> None:
    from shoal.cli import reach
    from shoal.cli.screen import show
    from shoal.forms.policy import differences

    with reach.connect(home) as client:
        before = client.policy()
        now = client.set_policy(wanted)
    if json:
        show.as_json(now)
        return
    changed = differences(before, now)
    if not changed:
        show.line(f"the policy is '{now.name}' already; nothing changed")
        return
    show.line(f"the policy is '{now.name}' now: {gist(now)}", "green")
    for field, one, other in changed:
        show.line(f"  {field}: {one or 'none'} -> {other or 'none'}", "dim")


def gist(one: Policy) -> str:
    from shoal.model.resources import plural

    tenants = f", {plural(len(one.tenants), 'tenant')}" if one.tenants else ""
    return f"order {one.order}, placement {one.placement}, preempt {one.preempt}{tenants}"
