"""The `shoal` command: the verbs by theme, each loaded only when it is called."""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, RunVerb, ServeVerb, Verb, write_verbatim
from shoal.cli.guard import guarded
from shoal.cli.quick import quicken
from shoal.forms.failure import USAGE, Failure


class Entry(NamedTuple):
    module: str
    summary: str
    grammar: type[Verb] = Verb


# The summaries stand here so that `shoal --help` loads no verb; a test keeps them true.
THEMES: dict[str, dict[str, Entry]] = {
    "Jobs": {
        "run": Entry("run", "Run a command, or a gang of them, on the cluster.", RunVerb),
        "map": Entry("map", "Run a function over the lines of a file, with all cores."),
        "ps": Entry("ps", "List the jobs."),
        "logs": Entry("logs", "Print what a job wrote, or a service's newest replica."),
        "why": Entry("why", "Tell why a job or service is where it is, and how it came there."),
        "explain": Entry("explain", "Tell what happened to a job, on one page."),
        "cancel": Entry("cancel", "Stop jobs for good."),
        "requeue": Entry("cancel", "Stop jobs and let them run again."),
    },
    "Services": {
        "serve": Entry("serve", "Serve a command behind one URL, or change how.", ServeVerb),
        "services": Entry("services", "List the services and how they do."),
        "service": Entry("services", "Show one service with its replicas, or stop it."),
    },
    "Cluster": {
        "up": Entry("up", "Start a cluster on this machine."),
        "down": Entry("up", "Stop the cluster and all that runs on it."),
        "join": Entry("join", "Make this machine a node of a cluster that is led elsewhere."),
        "leave": Entry("join", "Take this machine out of the cluster it has joined."),
        "salvage": Entry("salvage", "Save what can be read of a damaged store."),
        "status": Entry("status", "Show the whole cluster on one screen."),
        "page": Entry("page", "Print a link to the cluster's page that signs you in once."),
        "top": Entry("top", "Watch the cluster: jobs, nodes and services, live."),
        "nodes": Entry("nodes", "List the nodes and what is in use on them."),
        "cordon": Entry("nodes", "Start nothing new on nodes; what runs there goes on."),
        "drain": Entry("nodes", "Move jobs away from nodes, and start nothing new on them."),
        "uncordon": Entry("nodes", "Open nodes for jobs again."),
        "check": Entry("check", "Measure nodes, and compare them with others of their kind."),
        "policy": Entry("policy", "Show, check, compare or change the scheduling policy."),
        "events": Entry("events", "Tell what happened, one sentence each."),
        "report": Entry("report", "Tell where the GPU time and the money went."),
        "prices": Entry("prices", "Show, check or change the price list."),
    },
    "Try it": {
        "sim": Entry("sim", "Replay a trace or your own history under other policies."),
        "demo": Entry("demo", "Watch a small cluster lose a node and heal, in half a minute."),
    },
}
VERBS = {name: entry for theme in THEMES.values() for name, entry in theme.items()}

EPILOG = """\
Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 no cluster reachable,
130 interrupted; `shoal run --wait` ends with the job's own code.

Examples:
  shoal demo                              see it work, nothing is left behind
  shoal up --nodes 4 --gpus 8             four virtual nodes on this machine
  shoal run -n 2 -g 8 -- python train.py  a gang of two members with 8 GPUs each
  shoal logs -f j1                        watch it
  shoal serve chat --replicas 1..8 -g 1 -- python server.py
"""


class Verbs(TyperGroup):
    """A group whose commands are imported when asked for."""

    def get_params(self, ctx: Any) -> Any:
        return quicken(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        entry = VERBS.get(cmd_name)
        if entry is None:
            close = get_close_matches(cmd_name, VERBS, n=1)
            hint = f"did you mean: shoal {close[0]}" if close else "see: shoal --help"
            raise Failure(f"there is no verb '{cmd_name[:40]}'; {hint}", USAGE)
        module = importlib.import_module(f"shoal.cli.verbs.{entry.module}")
        verb = typer.Typer(add_completion=False, rich_markup_mode=None)
        verb.command(cmd_name, cls=entry.grammar)(getattr(module, cmd_name))
        return get_command(verb)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, VERBS))
        for theme, verbs in THEMES.items():
            with formatter.section(theme):
                formatter.write_dl([(f"{name:{width}}", e.summary) for name, e in verbs.items()])
        super().format_options(ctx, formatter)
        write_verbatim(formatter, EPILOG)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """They are written above, ahead of the options."""


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    subcommand_metavar="VERB ...",
)


def _print_version(asked: bool) -> None:
    if asked:
        from shoal import __version__

        print(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def shoal(
    context: typer.Context,
    home: HomeOption = DEFAULT_HOME,  # noqa: ARG001 - its callback does the work
    version: Annotated[  # noqa: ARG001
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Shoal turns the machines you have into one AI cluster."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def call(args: list[str]) -> int:
    """Run one command line and return its exit code; never raises."""
    command = get_command(app)

    def act() -> Any:
        with command.make_context("shoal", list(args)) as context:
            return command.invoke(context)

    return guarded(act)


def run(args: list[str] | None = None) -> NoReturn:
    sys.exit(call(sys.argv[1:] if args is None else args))
