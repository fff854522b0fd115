"""`shoal context`: the clusters that a user knows, and which one commands use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import CHOSEN, Argument, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.client.contexts import Chosen

ACTIONS = {"list": 0, "use": 1, "remove": 1}  # -> how many names it takes


@verb(
    Argument("action", "[list|use|remove]", "What to do. [list]", required=False, default="list"),
    Argument("names", "[NAME]", "A context; local is the home on this machine.", nargs=-1),
)
def context(action: str, names: tuple[str, ...], json: bool, home: Path) -> None:
    """List the clusters you know, or choose which one commands use.

    Each `shoal login` makes a context. The name local stands for the cluster
    on this machine, in --home.

    A command uses the cluster that --context or --home names; else the one that
    $SHOAL_CONTEXT or $SHOAL_HOME names; else the one chosen by `use` or by the
    last login; else the one in ~/.shoal. list marks it and says why.

    Examples:
      shoal context
      shoal context use lab
      shoal context use local
      shoal context remove lab
      SHOAL_CONTEXT=lab shoal ps
    """
    import click

    from shoal.cli.screen import show
    from shoal.forms import units

    if action not in ACTIONS:
        raise Failure(
            f"there is no 'shoal context {units.quoted(action)[1:-1]}'; "
            f"use one of {', '.join(ACTIONS)}",
            USAGE,
        )
    if len(names) != ACTIONS[action]:
        wants = "takes no name" if not ACTIONS[action] else "needs the name of one context"
        raise Failure(f"{action}: {wants}; see: shoal context --help", USAGE)
    if action == "list":
        _list(click.get_current_context().meta[CHOSEN], home, json)
        return
    (_use if action == "use" else _remove)(names[0])
    if json:
        show.as_json({"context": names[0]})
    elif action == "use":
        show.line(f"commands use {names[0]} from now on")
    else:
        show.line(f"{names[0]} is removed, with its token")


def _list(chosen: Chosen, home: Path, json: bool) -> None:
    from shoal.cli.screen import show
    from shoal.client import contexts
    from shoal.client.transport import fingerprint

    known = contexts.load().contexts
    rows = [(contexts.LOCAL, str(home), "")]
    for name, one in known.items():
        trust = fingerprint(one.certificate) if one.certificate else "by this system"
        rows.append((name, one.url if one.token else f"{one.url} (logged out)", trust))
    if json:
        listed = [
            {"name": name, "where": where, "trusted": trust, "used": name == chosen.name}
            for name, where, trust in rows
        ]
        show.as_json({"used": chosen.name, "why": chosen.why, "contexts": listed})
        return
    columns = [show.Column(title) for title in ("NAME", "IN USE", "WHERE", "TRUSTED")]
    cells = [[name, "yes" if name == chosen.name else "", *rest] for name, *rest in rows]
    show.table(columns, cells)
    show.note(f"commands use {chosen.name}: {chosen.why}")
    if chosen.name not in {row[0] for row in rows}:
        show.note(f"there is no context {chosen.name}; add it with: shoal login")


def _use(name: str) -> None:
    from shoal.client import contexts

    if name != contexts.LOCAL:
        contexts.find(name)
    with contexts.changing() as kept:
        kept.current = "" if name == contexts.LOCAL else name


def _remove(name: str) -> None:
    from shoal.client import contexts

    if name == contexts.LOCAL:
        raise Failure(
            "local is the home on this machine and stays in the list; to end it: shoal down"
        )
    contexts.find(name)
    with contexts.changing() as kept:
        kept.contexts.pop(name, None)
        if kept.current == name:
            kept.current = ""
