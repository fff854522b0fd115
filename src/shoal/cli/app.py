"""The `shoal` command: the verbs by theme, each imported only when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from keyword import iskeyword
from typing import Any, NoReturn

import click

from shoal.cli.command import Option, context_option, home_option, write_verbatim
from shoal.cli.errors import exit_code_of
from shoal.forms.failure import USAGE, Failure

# By theme: a verb, the module that has its function, and its summary, which is here so that
# `shoal --help` imports no verb; a test compares it with the verb's own help.
THEMES = {
    "Jobs": {
        "run": ("run", "Run a command, or a gang of them, on the cluster."),
        "map": ("map", "Run a function over the lines of a file, on all cores."),
        "ps": ("ps", "List the jobs."),
        "logs": ("logs", "Print the output of jobs, or of a service's newest replica."),
        "why": ("explain", "Show why a job or service is in its present state."),
        "explain": ("explain", "Show what happened to a job, on one page."),
        "exec": ("inside", "Run a command beside a running job, in the same surroundings."),
        "attach": ("inside", "Attach to the terminal of an interactive job."),
        "ssh-config": ("inside", "Print or write the entries with which ssh reaches running jobs."),
        "ssh-proxy": ("inside", "Connect ssh to a running job; the entries of ssh-config use it."),
        "dev": ("dev", "Work in a notebook on the cluster, in your browser."),
        "forward": ("inside", "Forward ports of this machine to ports of a running job."),
        "ls": ("inside", "List the files that a job has kept."),
        "cp": ("inside", "Copy files from or to a job."),
        "cancel": ("cancel", "Stop jobs for good."),
        "requeue": ("cancel", "Stop jobs and run them again."),
        "sleep": ("cancel", "Put jobs to sleep; others use their GPUs."),
        "wake": ("cancel", "Wake jobs that sleep; they go on where they stopped."),
        "note": ("nodes", "Write a note about a job, or show its notes."),
        "retry": ("cancel", "Run the failed elements of arrays again."),
        "notify": ("notify", "Choose who gets a message when something happens."),
        "workflow": ("schedule", "Show the jobs of a workflow as a graph."),
        "schedule": ("schedule", "Run a command, a job file or a workflow at certain times."),
        "secret": ("notify", "Set, list or remove the secrets of your jobs."),
    },
    "Services": {
        "serve": ("services", "Serve a command behind one URL, or change a service."),
        "services": ("services", "List the services and their load."),
        "service": ("services", "Show one service with its replicas, roll it back, or stop it."),
    },
    "Cluster": {
        "up": ("up", "Start a cluster on this machine."),
        "down": ("up", "Stop the cluster and everything that runs on it."),
        "heads": ("up", "List the heads of this cluster, or invite another one."),
        "upgrade": ("up", "Bring this version of Shoal to the cluster; jobs go on."),
        "join": ("join", "Add this machine to a cluster as a node."),
        "leave": ("join", "Remove this machine from the cluster it joined."),
        "install-service": ("join", "Start this machine's part of a cluster at boot."),
        "slurm-commands": ("join", "Write sbatch, srun and the like, for Slurm scripts."),
        "ends": ("nodes", "Say until when this machine's node lives."),
        "backup": ("backup", "Save the cluster in one file, while it works."),
        "restore": ("backup", "Bring a cluster back from a backup."),
        "salvage": ("backup", "Recover what is readable from a damaged store."),
        "status": ("status", "Show the whole cluster on one screen."),
        "page": ("login", "Print a link that signs you in to the cluster's page."),
        "top": ("status", "Watch jobs, nodes and services live."),
        "nodes": ("nodes", "List the nodes and what is in use on them."),
        "cordon": ("nodes", "Start nothing new on nodes; running jobs continue."),
        "drain": ("nodes", "Move jobs off nodes, and start nothing new on them."),
        "uncordon": ("nodes", "Open nodes for jobs again."),
        "label": ("nodes", "Set or remove labels of nodes or jobs."),
        "taint": ("nodes", "Keep jobs away from nodes, unless they tolerate it."),
        "supply": ("status", "Show where nodes come from, and what was ordered."),
        "check": ("check", "Measure nodes, and compare them with similar nodes."),
        "policy": ("policy", "Show, check, compare or change the scheduling policy."),
        "events": ("explain", "Show what happened, one sentence per event."),
        "report": ("report", "Show where GPU time and money went."),
        "prices": ("policy", "Show, check or change the price list."),
    },
    "People": {
        "tenant": ("tenant", "List, add or remove the tenants whose jobs are kept apart."),
        "user": ("tenant", "List, add, change or remove users."),
        "token": ("token", "List, add, rotate or remove the tokens with which users sign in."),
        "audit": ("tenant", "Show who did what, or verify that the audit log is unchanged."),
        "oidc": ("tenant", "Show, set or remove the sign-in by OpenID Connect."),
        "whoami": ("tenant", "Show who you are to the cluster: user, tenant, role and token."),
    },
    "From other machines": {
        "login": ("login", "Log in to a cluster whose head is another machine."),
        "logout": ("login", "Forget the token of a cluster."),
        "context": ("login", "List the clusters you know, or choose which one commands use."),
        "completion": ("login", "Print what your shell needs to complete verbs and names."),
    },
    "Try it": {
        "plan": ("plan", "Plan a cluster: how many GPUs, for how long, at what cost."),
        "sim": ("sim", "Replay a trace or your own history under other policies."),
        "import": ("report", "Show where a Slurm site's GPU time went."),
        "demo": ("demo", "Watch a small cluster lose a node and recover, in half a minute."),
    },
}
VERBS = {name: summary for verbs in THEMES.values() for name, (_, summary) in verbs.items()}
MODULES = {name: module for verbs in THEMES.values() for name, (module, _) in verbs.items()}

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

COLUMN_MAX = 10  # a longer name widens only its own theme, so that summaries fit on a line

EPILOG = """\
Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 no cluster reachable,
130 interrupted. `shoal run --wait` returns the job's own exit code.

Examples:
  shoal demo                              see it work; everything is removed again
  shoal up --nodes 4 --gpus 8             start four virtual nodes on this machine
  shoal run -n 2 -g 8 -- python train.py  run a gang of two members with 8 GPUs each
  shoal logs -f j1                        watch its output
  shoal serve chat --replicas 1..8 -g 1 -- python server.py
"""


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
            raise Failure(f"there is no verb '{cmd_name[:40]}'; {hint}", USAGE)
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

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = min(max(map(len, VERBS)), COLUMN_MAX)
        for theme, verbs in THEMES.items():
            with formatter.section(theme):
                formatter.write_dl([(f"{name:{width}}", VERBS[name]) for name in verbs])
        click.Command.format_options(self, ctx, formatter)
        write_verbatim(formatter, EPILOG)


def _print_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:  # noqa: ARG001
    if asked:
        from shoal import __version__

        print(f"shoal {__version__}")
        ctx.exit()


@click.pass_context
def _start(ctx: click.Context, /, **_: object) -> None:
    """Shoal turns the machines you have into one AI cluster."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


shoal = Verbs(
    "shoal",
    callback=_start,
    help=_start.__doc__,
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
