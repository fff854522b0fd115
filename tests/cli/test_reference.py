"""docs/reference/verbs.md is what `shoal VERB --help` prints. `python -m tests.cli.test_reference`
writes it again."""

from __future__ import annotations

from pathlib import Path

import click

from shoal.cli.app import THEMES, shoal

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "verbs.md"
HEAD = """# Verbs

What `shoal VERB --help` prints, for every verb. Written by `python -m tests.cli.test_reference`.
"""
WIDTH = 96


def verbs_page() -> str:
    parts = [HEAD]
    for theme, verbs in THEMES.items():
        parts.append(f"## {theme}\n")
        for verb in verbs:
            parts += _help(verb)
    return "\n".join(parts)


def _help(verb: str) -> list[str]:
    top = click.Context(shoal, info_name="shoal", terminal_width=WIDTH, max_content_width=WIDTH)
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
        command, info_name=name, parent=parent, terminal_width=WIDTH, max_content_width=WIDTH
    )
    text = click.unstyle(command.get_help(context)).strip()
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return [f"{level} {context.command_path}\n", f"```\n{lines}\n```\n"]


def test_the_page_of_verbs_is_up_to_date() -> None:
    assert PAGE.read_text() == verbs_page(), "run: python -m tests.cli.test_reference"


if __name__ == "__main__":
    PAGE.write_text(verbs_page())
