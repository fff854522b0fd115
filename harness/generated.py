"""Writes what follows from the tables of calls, columns and verbs: `make generate`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from textwrap import wrap
from typing import Any

import click
import msgspec

from shoal.calls.call import Needs, declared_in
from shoal.calls.page import MachineCalls, PageCalls
from shoal.calls.table import GROUPS, TABLE
from shoal.cli.app import shoal
from shoal.cli.first_page import THEMES
from shoal.model.columns import COLUMNS, WIDTHS
from shoal.sdk.asynchronous import NOT_CALLS, OWN
from shoal.sdk.client import Client

ROOT = Path(__file__).parent.parent
WIDTH = 120
HELP_WIDTH = 96


def asynchronous(text: str) -> str:
    """The calls of the asynchronous client, one line each."""
    names = [name for name in dir(Client) if not name.startswith("_")]
    lines = [f"    {name} = _call(Client.{name})" for name in names if name not in NOT_CALLS | OWN]
    return _between(text, "    # -- made by `make generate` --\n", "    # -- end --\n", lines)


def reference(_: str) -> str:
    """docs/reference/calls.md."""
    lines = [INTRO, "## Who may", "", "| sender | may also send |", "| --- | --- |"]
    for needs in Needs:
        names = ", ".join(f"`{one.name}`" for one in TABLE if one.may is needs)
        lines.append(f"| {needs.value} | {names} |")
    names = ", ".join(f"`{one.name}`" for one in TABLE if one.neighbor)
    lines += ["", f"A token for a [neighbor](../neighbors.md) is good for these alone: {names}."]
    for title, group in GROUPS.items():
        lines += ["", f"## {title}", ""]
        if group not in (PageCalls, MachineCalls):
            lines += ["Methods of `shoal.Client`, and to be awaited of `shoal.AsyncClient`.", ""]
        for one in declared_in(group):
            facts = [_signature(one.function), one.may.value, f"answered by {one.head.value}"]
            facts += ["streams"] * one.streams
            lines += [
                f"### {one.method} {one.path}",
                "",
                " · ".join(facts),
                "",
                *wrap(one.text, WIDTH, break_on_hyphens=False),
                "",
            ]
        lines.pop()
    return "\n".join(lines) + "\n"


INTRO = """# Calls

Every call of the API: its method and path, the client's method that sends it, who may send it, and
which of several heads answers. `make generate` writes this page from `src/shoal/calls/`. The types
are in the OpenAPI document of a running cluster, at `/schema/openapi.json`.

Send the token as `Authorization: Bearer TOKEN`. Bodies and answers are JSON. Parameters that are
not in the path are in the query, or fields of the body. A refusal has a `message`, and the `field`
that is wrong.
"""


def _signature(function: Callable[..., Any]) -> str:
    words: list[str] = []
    keyed = False
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyed:
            words, keyed = [*words, "*"], True
        word = f"{parameter.name}: {parameter.annotation}"
        if parameter.default is not parameter.empty:
            word += f" = {_default(parameter.default)}"
        words.append(word)
    answer = function.__annotations__["return"]
    return f"`{function.__name__}({', '.join(words)}) -> {answer}`"


def _default(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        return f"{type(value).__name__}()"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def columns(_: str) -> str:
    """src/shoal/web/columns.js."""
    lines = [COLUMNS_HEAD]
    for one in COLUMNS.values():
        field = "" if one.of or one.value else one.field or one.name
        sort = one.sort or one.name * one.sorts
        heading, width = one.heading or one.name.capitalize(), one.width or WIDTHS[one.kind]
        words = [one.name, heading, one.kind.value, field, sort, width, one.also]
        lines.append(f"  {json.dumps(words)},")
    return "\n".join([*lines, "]);"]) + "\n"


COLUMNS_HEAD = """// The columns of the list of jobs, made from model/columns.py by `make generate`.

/** @typedef {[name: string, heading: string, kind: string, field: string, sort: string,
 *   width: string, also: string]} Column */

export const TABLE = /** @type {Column[]} */ (["""


VERBS_INTRO = """# Verbs

What `shoal VERB --help` prints, for every verb. Written by `make generate`.
"""


def verbs(_: str) -> str:
    """docs/reference/verbs.md."""
    parts = [VERBS_INTRO]
    for theme, names in THEMES.items():
        parts.append(f"## {theme}\n")
        for verb in names:
            parts += _help(verb)
    return "\n".join(parts)


def _help(verb: str) -> list[str]:
    top = click.Context(
        shoal, info_name="shoal", terminal_width=HELP_WIDTH, max_content_width=HELP_WIDTH
    )
    command = shoal.get_command(top, verb)
    assert command is not None, verb
    parts = _block(command, verb, top, "###")
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=verb, parent=top)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            parts += _block(inner, name, context, "####")
    return parts


def _block(command: click.Command, name: str, parent: click.Context, level: str) -> list[str]:
    context = click.Context(
        command,
        info_name=name,
        parent=parent,
        terminal_width=HELP_WIDTH,
        max_content_width=HELP_WIDTH,
    )
    text = click.unstyle(command.get_help(context)).strip()
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return [f"{level} {context.command_path}\n", f"```\n{lines}\n```\n"]


FILES: dict[str, Callable[[str], str]] = {
    "src/shoal/sdk/asynchronous.py": asynchronous,
    "docs/reference/calls.md": reference,
    "src/shoal/web/columns.js": columns,
    "docs/reference/verbs.md": verbs,
}


def _between(text: str, begin: str, end: str, lines: list[str]) -> str:
    head, _, rest = text.partition(begin)
    return f"{head}{begin}" + "".join(f"{line}\n" for line in lines) + end + rest.partition(end)[2]


def main() -> None:
    for name, make in FILES.items():
        path = ROOT / name
        before = path.read_text() if path.exists() else ""
        path.parent.mkdir(exist_ok=True)
        path.write_text(make(before))


if __name__ == "__main__":
    main()
