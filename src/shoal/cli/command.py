"""How a verb is written: its arguments and options, and the help page made from them."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from pathlib import Path  # slow to import, and `shoal --help` has no use for it

    from shoal.forms.fields import Field, Table
    from shoal.model.finding import JobFilter


EXAMPLES = "\nExamples:\n"
CONTEXT_NAME = "shoal.context.name"  # in Click's `meta`: what --context or SHOAL_CONTEXT named
CHOSEN = "shoal.chosen"  # the cluster that the verb uses, and why
NUMBER_DIGITS_MAX = 16  # more than any number here needs; Python itself refuses thousands


class _Suggested(click.Parameter):
    """Its values are completed in a shell."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from shoal.cli.completion import suggest

        return suggest(ctx, self, incomplete)


class Argument(_Suggested, click.Argument):
    """`name` is the function's parameter, `metavar` is what the help page calls it."""

    heading = "Arguments"

    def __init__(self, name: str, metavar: str, help: str, **attrs: Any) -> None:  # noqa: A002
        super().__init__([name], metavar=metavar, **attrs)
        self.help = help


class Option(_Suggested, click.Option):
    """The help page lists it under `heading`. Defaults are part of the help text."""

    def __init__(
        self,
        *names: str,
        help: str,  # noqa: A002
        heading: str = "Options",
        **attrs: Any,
    ) -> None:
        super().__init__(names, help=help, **attrs)
        self.heading = heading


def flag(*names: str, help: str, heading: str = "Options") -> Option:  # noqa: A002
    return Option(*names, help=help, heading=heading, is_flag=True, default=False)


def number(least: int | None = None, most: int | None = None) -> Callable[[str | int], int]:
    """The `type` of an option that takes a whole number from `least` to `most`."""

    def read(value: str | int) -> int:
        if isinstance(value, str):
            if not (value.removeprefix("-").isdecimal() and value.isascii()):
                raise click.BadParameter(f"{value[:40]!r} is not a whole number")
            if len(value) > NUMBER_DIGITS_MAX:
                raise click.BadParameter("the number is too large")
            value = int(value)
        if least is not None and value < least:
            raise click.BadParameter(f"must be at least {least}, not {value}")
        if most is not None and value > most:
            raise click.BadParameter(f"must be at most {most}, not {value}")
        return value

    return read


def job_word(text: str) -> str:
    """The `type` of an argument that names a job, by its id or name: what can be neither is refused
    before anybody is asked."""
    import re

    from shoal.forms import units
    from shoal.forms.failure import USAGE, Failure

    word = text.strip()
    numbered = re.fullmatch(r"j[0-9]+(\.[0-9]+)*", word)
    good = r"j[0-9]{1,15}(\.[0-9]{1,9}){0,2}" if numbered else r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}"
    if not re.fullmatch(good, word):
        kind = "a job id like j7 or j7.3, or a name"
        message = f"JOB: {units.quoted(word)} is not {kind}; list them with: shoal ps -a"
        raise Failure(message, USAGE)
    return word


def home_option() -> Option:
    """Its callback makes this process, and every process it starts, use the same home."""
    return Option(
        "--home",
        metavar="DIR",
        help="Folder of a cluster on this machine. [$SHOAL_HOME or ~/.shoal]",
        envvar="SHOAL_HOME",
        default="~/.shoal",
        callback=_settle_home,
    )


def _settle_home(context: click.Context, option: click.Parameter, path: str) -> Path:
    from pathlib import Path

    from shoal.machine.files import require_own

    if "\0" in path:
        raise click.BadParameter("a path cannot contain a NUL byte")
    try:
        settled = Path(path).expanduser().absolute()
    except RuntimeError:  # a user id without an entry, as in containers
        raise click.BadParameter(
            "this user has no home directory; set HOME or SHOAL_HOME, or give --home DIR"
        ) from None
    require_own(settled)
    _note_source(context, option)
    os.environ["SHOAL_HOME"] = str(settled)
    return settled


def context_option() -> Option:
    """The other machines' clusters: `settle_context` sees which one a verb uses."""
    return Option(
        "--context",
        metavar="NAME",
        help="A cluster from `shoal context list`. [$SHOAL_CONTEXT]",
        envvar="SHOAL_CONTEXT",
        expose_value=False,
        callback=_note_context,
    )


def _note_context(context: click.Context, option: click.Parameter, name: str | None) -> None:
    if _note_source(context, option) and name:
        context.meta[CONTEXT_NAME] = name


def _note_source(context: click.Context, option: click.Parameter) -> bool:
    """Remembers whether a flag, a variable or nothing gave the value. The group and the verb have
    the same options, and the first changes the variables: it counts, unless the verb has a flag."""
    key, source = f"shoal.{option.name}", context.get_parameter_source(option.name or "")
    if key in context.meta and source is not ParameterSource.COMMANDLINE:
        return False
    context.meta[key] = source
    return True


def settle(context: click.Context, *, on_head: bool) -> None:
    """Decides which cluster a verb uses, for this process and every process it starts: by a flag,
    then by a variable, then the context in use. A verb for the head takes a home alone."""
    from shoal.client import contexts
    from shoal.forms.failure import USAGE, Failure

    home, source = context.meta.get("shoal.home"), context.meta.get("shoal.context")
    name = context.meta.get(CONTEXT_NAME, "")
    if ParameterSource.COMMANDLINE is home is source:
        raise Failure("--context: cannot be combined with --home; give one of them", USAGE)
    if source is ParameterSource.COMMANDLINE:
        chosen = contexts.Chosen(name, "--context names it")
    elif home is ParameterSource.COMMANDLINE:
        chosen = contexts.Chosen(contexts.LOCAL, "--home names its home")
    elif on_head and not name:
        chosen = contexts.Chosen(contexts.LOCAL, "")
    else:
        by_variable = home is ParameterSource.ENVIRONMENT
        chosen = contexts.choose(name, os.environ["SHOAL_HOME"] if by_variable else "")
    if on_head and not chosen.is_local:
        verb = context.command_path
        message = f"{verb} is for the cluster of this machine, not for the context {name[:64]}"
        raise Failure(f"{message}; run it on the head, or without the context", USAGE)
    context.meta[CHOSEN] = chosen
    os.environ.pop("SHOAL_CONTEXT", None)  # SHOAL_HOME is set
    if not chosen.is_local:
        os.environ["SHOAL_CONTEXT"] = chosen.name


def _require_linux(context: click.Context) -> None:
    from shoal.forms.failure import REFUSED, Failure

    if sys.platform != "linux":
        message = f"{context.command_path} needs Linux, as every machine of a cluster does"
        raise Failure(f"{message}; from here, use a cluster elsewhere: shoal login", REFUSED)


class Verb(click.Command):
    """The function's docstring is the help text, printed as written. The examples come last."""

    on_head = False

    def invoke(self, ctx: click.Context) -> object:
        if self.on_head:
            _require_linux(ctx)
        if any(one.name == "home" for one in self.params):
            settle(ctx, on_head=self.on_head)
        return super().invoke(ctx)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        text, _, examples = (self.help or "").partition(EXAMPLES)
        self.format_usage(ctx, formatter)
        write_verbatim(formatter, text)
        self.format_options(ctx, formatter)
        write_verbatim(formatter, "Examples:\n" + examples)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        arguments = [one for one in self.get_params(ctx) if isinstance(one, Argument)]
        return ["[OPTIONS]", *[str(one.metavar) for one in arguments]]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each option under its heading; those without a heading of their own come last."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            if getattr(one, "hidden", False):
                continue
            heading = getattr(one, "heading", "Options")  # --help is Click's own
            rows.setdefault(heading, []).append(_row(one))
        width = max(len(name) for section in rows.values() for name, _ in section)
        for title in sorted(rows, key=lambda title: title == "Options"):
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in rows[title]])


def verb(
    *parameters: click.Parameter, cls: type[Verb] = Verb, home: bool = True, on_head: bool = False
) -> Callable[[Callable[..., int | None]], Verb]:
    """Makes a verb of a function. Every verb has `--json`, `--home` unless it has no cluster, and
    `--context` unless it works only on the head. The function may return an exit code."""
    shared = [flag("--json", help="Print JSON, for scripts.")]
    if home:
        shared.append(home_option())
        if not on_head:
            shared.append(context_option())

    def make(function: Callable[..., int | None]) -> Verb:
        made = cls(
            name=function.__name__.rstrip("_").replace("_", "-"),
            callback=function,
            params=[*parameters, *shared],
            help=inspect.cleandoc(function.__doc__ or ""),
        )
        made.on_head = on_head
        return made

    return make


class RunVerb(Verb):
    """Its argument is named `words`. Flags end where the command begins, so `shoal run python
    train.py --lr 3` passes `--lr` to the script. A job file contains its command, so flags may
    follow the file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = self.words(ctx, args)
        ctx.allow_interspersed_args = bool(words) and _is_job_file(words[0])
        return super().parse_args(ctx, args)

    def words(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What remains of `args` where the flags end."""
        ctx.allow_interspersed_args = False
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        words = given.get("words")
        return list(words) if isinstance(words, tuple | list) else []


class ServeVerb(RunVerb):
    """Its argument `words` is NAME and then the command. Flags may come before NAME and after it,
    up to `--` or the first word of the command. A service file contains its command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = self.words(ctx, args)
        if words and not _is_job_file(words[0]):
            before, after = args[: len(args) - len(words)], words[1:]
            command = self.words(ctx, after)
            flags = after[: len(after) - len(command)]
            for part in (before, flags):
                if part and part[-1] == "--":
                    part.pop()
            args = [*before, *flags, "--", words[0], *command]
        return super().parse_args(ctx, args)


def _is_job_file(word: str) -> bool:
    from shoal.forms.datafile import is_job_file

    return is_job_file(word)


def _row(parameter: click.Parameter) -> tuple[str, str]:
    """The names of a parameter and its help text."""
    names: list[str] = []
    if isinstance(parameter, click.Option):
        names = [*sorted(parameter.opts, key=len), *parameter.secondary_opts]
    shown = [", ".join(names), parameter.metavar]
    return " ".join(part for part in shown if part), getattr(parameter, "help", None) or ""


def write_verbatim(formatter: click.HelpFormatter, text: str) -> None:
    formatter.write_paragraph()
    for line in text.strip("\n").splitlines():
        formatter.write(f"{line}\n" if line else "\n")


# The flags of `shoal run` and `shoal serve`, made from the table of fields.


def flags_of(table: Table) -> list[Option]:
    return [_flag(field) for field in table.values() if field.heading]


def given_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Only the flags that were given. 0 is a value, and False is what --no-pack says."""
    return {name: value for name, value in flags.items() if value is not None and value != ()}


def _flag(field: Field) -> Option:
    names, attrs = [field.name, field.flag], dict[str, Any]()
    if field.takes is bool:
        attrs = {"is_flag": True, "default": None}
        names += field.metavar.split()
        if field.default:  # it decides if neither is given
            names[1] += "/--no-" + field.flag.removeprefix("--")
    else:
        *short, metavar = field.metavar.removesuffix("...").split()
        names += short
        kind = number() if field.takes is int else None
        attrs = {"metavar": metavar, "type": kind, "multiple": field.takes is list}
    return Option(*names, help=field.text, heading=field.heading, **attrs)


# The flags by which `ps`, `events` and `logs` find jobs.


HEADING = "Which jobs"


def finding_flags(*without: str) -> list[Option]:
    """One set for all verbs, so that what finds a job in one of them finds it in the others."""
    found = [
        Option("--user", metavar="USER", default="", help="Submitted by this user."),
        Option("--tenant", metavar="NAME", default="", help="Of this tenant."),
        Option("--name", metavar="PATTERN", default="", help="Its name, e.g. 'train-*'."),
        Option(
            "--state",
            metavar="STATE",
            default="",
            help="In this state, e.g. waiting or failed; several with commas.",
        ),
        Option(
            "--label",
            "-l",
            metavar="K=V",
            multiple=True,
            help="With this label: run=a, run=a|b, run!=a, run or !run.",
        ),
        Option("--since", metavar="T", help="Submitted, started or ended in the last 2h, 1d ..."),
        Option("--until", metavar="T", help="Submitted longer ago than 2h, 1d ..."),
        Option("--node", metavar="NODE", default="", help="Its newest attempt is or was there."),
        Option("--service", metavar="NAME", default="", help="A replica of this service."),
        Option(
            "--text",
            metavar="WORDS",
            default="",
            help="All of these words in its id, name, user, command or labels.",
        ),
    ]
    for one in found:
        one.heading = HEADING
    return [one for one in found if one.name not in without]


def filter_of(given: dict[str, Any]) -> JobFilter:
    """The flags that were given, as one filter."""
    from shoal.model.finding import JobFilter

    since_ms = moment_ms(given.get("since"))
    wanted = JobFilter(
        user=given.get("user", ""),
        tenant=given.get("tenant", ""),
        name=given.get("name", ""),
        states=tuple(one for one in given.get("state", "").split(",") if one),
        labels=tuple(given.get("label", ())),
        since_ms=since_ms,
        node=given.get("node", ""),
        text=given.get("text", ""),
        service=given.get("service", ""),
        until_ms=moment_ms(given.get("until"), "until"),
    )
    problem = wanted.problem()
    if problem is not None:
        raise Failure(f"--{problem[0]}: {problem[1]}", USAGE)
    return wanted


def moment_ms(since: str | None, flag: str = "since") -> int:
    """The time that long ago; 0: none was given."""
    from shoal.forms import units

    try:
        return int(time.time() * 1000) - units.duration_ms(since) if since else 0
    except units.BadAmount as error:
        raise Failure(f"--{flag}: {error}", USAGE) from None
