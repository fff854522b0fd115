"""How verbs that still use Typer are written; `command.py` is for the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from shoal.cli.quick import quicken
from shoal.files import require_own
from shoal.forms.datafile import is_job_file
from shoal.forms.failure import USAGE, Failure

EXAMPLES = "\nExamples:\n"
PLAIN_HEADING = "Options"


def _settle_home(path: Path) -> Path:
    """The rest of this process, and what it starts, must mean the same home."""
    if "\0" in str(path):
        raise Failure("--home: a path cannot hold a NUL byte", USAGE)
    settled = path.expanduser().absolute()
    require_own(settled)
    os.environ["SHOAL_HOME"] = str(settled)
    return settled


HOME_OPTION = typer.Option(
    "--home",
    metavar="DIR",
    envvar="SHOAL_HOME",
    callback=_settle_home,
    help="The cluster's folder. [$SHOAL_HOME or ~/.shoal]",
    show_envvar=False,
    show_default=False,
)
HomeOption = Annotated[Path, HOME_OPTION]
DEFAULT_HOME = Path("~/.shoal")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


class Verb(TyperCommand):
    """Its docstring is its help, printed as written; the examples go last, where the eye rests."""

    def get_params(self, ctx: Any) -> Any:
        return quicken(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        text, _, examples = (self.help or "").partition(EXAMPLES)
        self.format_usage(ctx, formatter)
        write_verbatim(formatter, text)
        self.format_options(ctx, formatter)
        write_verbatim(formatter, "Examples:\n" + examples)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *[str(p.metavar or p.name) for p in arguments]]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Under the headings that the options name; those without one come last."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if not parameter.hidden:
                rows.setdefault(_heading(parameter), []).append(_row(parameter))
        width = max(len(name) for section in rows.values() for name, _ in section)
        for title in sorted(rows, key=lambda title: title == PLAIN_HEADING):
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in rows[title]])


class RunVerb(Verb):
    """Its argument is named `words`. Flags end where the command begins, so that `shoal run python
    train.py --lr 3` means what it says; a job file has its command inside, so flags may follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = False
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        words: list[str] = list(given.get("words") or ())
        ctx.allow_interspersed_args = bool(words) and is_job_file(words[0])
        return super().parse_args(ctx, args)


class ServeVerb(Verb):
    """Its argument is named `words`: NAME, then the command. Flags may stand before NAME and after
    it, up to `--` or the command's first word; a service file has its command inside."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = self._words(ctx, args)
        if words and is_job_file(words[0]):
            ctx.allow_interspersed_args = True
            return super().parse_args(ctx, args)
        if words:
            before, after = args[: len(args) - len(words)], words[1:]
            command = self._words(ctx, after)
            flags = after[: len(after) - len(command)]
            for part in (before, flags):
                if part and part[-1] == "--":
                    part.pop()
            args = [*before, *flags, "--", words[0], *command]
        ctx.allow_interspersed_args = False
        return super().parse_args(ctx, args)

    def _words(self, ctx: Any, args: list[str]) -> list[str]:
        """What is left of `args` where the flags end."""
        ctx.allow_interspersed_args = False
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        return list(given.get("words") or ())


def _heading(parameter: Any) -> str:
    plain = PLAIN_HEADING if parameter.param_type_name == "option" else "Arguments"
    return getattr(parameter, "rich_help_panel", None) or plain


def _row(parameter: Any) -> tuple[str, str]:
    """Its name and what it is for; defaults stand in the text, in the user's words."""
    option = parameter.param_type_name == "option"
    names = [*sorted(parameter.opts, key=len), *parameter.secondary_opts] if option else []
    shown = [", ".join(names), parameter.metavar]
    return " ".join(part for part in shown if part), parameter.help or ""


def write_verbatim(formatter: Any, text: str) -> None:
    formatter.write_paragraph()
    for line in text.strip("\n").splitlines():
        formatter.write(f"{line}\n" if line else "\n")


def command(name: str, function: Any) -> Any:
    verb = typer.Typer(add_completion=False, rich_markup_mode=None)
    verb.command(name, cls={"run": RunVerb, "serve": ServeVerb}.get(name, Verb))(function)
    return get_command(verb)
