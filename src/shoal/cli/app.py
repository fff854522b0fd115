"""The `shoal` command: each verb is imported only when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from keyword import iskeyword
from typing import Any, NoReturn

import click

from shoal.cli.command import Option, context_option, home_option
from shoal.cli.errors import exit_code_of
from shoal.cli.first_page import MODULES, VERBS, first_page
from shoal.forms.failure import USAGE, Failure

# What people type who know other tools.
OTHER_WORDS = {
    **dict.fromkeys(("stop", "kill", "delete", "rm", "scancel"), "cancel JOB"),
    **dict.fromkeys(("jobs", "job", "queue", "list", "get", "squeue"), "ps"),
    **dict.fromkeys(("submit", "sbatch", "srun", "start", "launch"), "run -- COMMAND"),
    **dict.fromkeys(("show", "describe", "history"), "explain JOB"),
    **dict.fromkeys(("restart", "rerun"), "requeue JOB"),
    **dict.fromkeys(("output", "tail"), "logs JOB"),
    **dict.fromkeys(("shell", "ssh"), "exec JOB"),
    **dict.fromkeys(("info", "sinfo"), "status"),
    "destroy": "down",
}


class Verbs(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:  # noqa: ARG002
        if cmd_name not in VERBS:
            from difflib import get_close_matches

            close = [OTHER_WORDS[cmd_name]] if cmd_name in OTHER_WORDS else []
            close = close or get_close_matches(cmd_name, VERBS, n=1)
            hint = f"did you mean: shoal {close[0]}" if close else "see: shoal --help"
            raise Failure(f"unknown verb '{cmd_name[:40]}'; {hint}", USAGE)
        module = importlib.import_module(f"shoal.cli.verbs.{MODULES[cmd_name]}")
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name.replace("-", "_")
        command: click.Command = getattr(module, name)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Without importing a verb."""
        from click.shell_completion import CompletionItem

        verbs = {name: text for name, text in VERBS.items() if name.startswith(incomplete)}
        found = [CompletionItem(name, help=text) for name, text in verbs.items()]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        formatter.write(first_page())


def _print_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:  # noqa: ARG001
    if asked:
        from shoal import __version__

        print(f"shoal {__version__}")
        ctx.exit()


@click.pass_context
def _start(ctx: click.Context, /, **_: object) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


shoal = Verbs(
    "shoal",
    callback=_start,
    params=[
        home_option(),
        context_option(),
        Option(
            "--version",
            help="Print the version.",
            is_flag=True,
            is_eager=True,
            callback=_print_version,
        ),
    ],
    invoke_without_command=True,
    subcommand_metavar="VERB ...",
    context_settings={"max_content_width": 100},
)


def call(args: list[str]) -> int:
    """Run one command line; returns its exit code and never raises."""

    def act() -> Any:
        with shoal.make_context("shoal", list(args)) as context:
            return shoal.invoke(context)

    return exit_code_of(act)


def run(args: list[str] | None = None) -> NoReturn:
    asked = os.environ.pop("_SHOAL_COMPLETE", "")
    if asked and args is None:
        from shoal.cli.completion import answer

        sys.exit(answer(shoal, asked))
    sys.exit(call(sys.argv[1:] if args is None else args))
