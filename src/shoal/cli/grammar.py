"""How every verb is written on the command line: its help page and the options all share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shoal.cli.guard import USAGE, Failure
from shoal.cli.quick import quicken

EXAMPLES = "\nExamples:\n"


def _settle_home(path: Path) -> Path:
    """The rest of this process, and what it starts, must mean the same home."""
    if "\0" in str(path):
        raise Failure("--home: a path cannot hold a NUL byte", USAGE)
    settled = path.expanduser().absolute()
    os.environ["SHOAL_HOME"] = str(settled)
    return settled


HOME_OPTION = typer.Option(
    "--home",
    metavar="DIR",
    envvar="SHOAL_HOME",
    callback=_settle_home,
    help="Where the cluster keeps its files. [$SHOAL_HOME or ~/.shoal]",
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

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Under the headings that the options name; those without one come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
                heading = getattr(parameter, "rich_help_panel", None) or plain
                sections.setdefault(heading, []).append(record)
        if "Options" in sections:
            sections["Options"] = sections.pop("Options")
        width = max(len(name) for records in sections.values() for name, _ in records)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in records])


class RunVerb(Verb):
    """Its argument is named `words`. Flags end where the command begins, so that `shoal run python
    train.py --lr 3` means what it says; a job file has its command inside, so flags may follow."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = False
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        words: list[str] = list(given.get("words") or ())
        ctx.allow_interspersed_args = bool(words) and is_job_file(words[0])
        return super().parse_args(ctx, args)


def _row(parameter: Any) -> tuple[str, str]:
    """Its name and what it is for; defaults stand in the text, in the user's words."""
    names = sorted(parameter.opts, key=len) if parameter.param_type_name == "option" else []
    shown = [", ".join(names), parameter.metavar]
    return " ".join(part for part in shown if part), parameter.help or ""


def is_job_file(word: str) -> bool:
    return word.lower().endswith((".yaml", ".yml", ".toml", ".json"))


def write_verbatim(formatter: Any, text: str) -> None:
    formatter.write_paragraph()
    for line in text.strip("\n").splitlines():
        formatter.write(f"{line}\n" if line else "\n")
