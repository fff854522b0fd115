"""`shoal exec`: a command beside a running job, in the same surroundings."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.command import Argument, RunVerb, flag, verb


class ExecVerb(RunVerb):
    """Its argument is named `words`: JOB, then the command, whose flags are its own."""

    def parse_args(self, ctx: object, args: list[str]) -> list[str]:
        """`shoal exec j7 -it -- ls -l`: flags may also come between JOB and the command."""
        import click

        assert isinstance(ctx, click.Context)
        words = self.words(ctx, args)
        if len(words) > 1:
            before, job, rest = args[: len(args) - len(words)], words[0], words[1:]
            command = self.words(ctx, rest)
            flags = rest[: len(rest) - len(command)]
            before = [word for word in before if word != "--"]
            flags = flags[:-1] if flags and flags[-1] == "--" else flags
            args = [*before, *flags, "--", job, *command]
        ctx.allow_interspersed_args = False
        return click.Command.parse_args(self, ctx, args)


@verb(
    Argument("words", "JOB[.MEMBER] [-- COMMAND...]", "A job, and what to run.", nargs=-1),
    flag("--interactive", "-i", help="Pass the input on."),
    flag("--tty", "-t", help="Give it a terminal."),
    cls=ExecVerb,
)
def exec(words: tuple[str, ...], interactive: bool, tty: bool, json: bool, home: Path) -> int:  # noqa: A001, ARG001
    """Run a command beside a running job, in the same surroundings.

    It runs as the job's Unix user, in its container, within its limits, in its
    working directory and with its variables, such as CUDA_VISIBLE_DEVICES.
    Without a command, it is a shell, with -it if you are at a terminal. It
    ends with the job's member. A job that is asleep is woken first. The exit
    code is the command's own; 255 means that the connection or the job ended
    first.

    Examples:
      shoal exec j7
      shoal exec j7 -- nvidia-smi
      shoal exec -it j7.1 -- python
      tar c data | shoal exec -i j7 -- tar x
    """
    import sys

    from shoal.cli.errors import print_error
    from shoal.cli.screen.show import note
    from shoal.forms.failure import USAGE, Failure
    from shoal.model.session import Kind
    from shoal.sessions.session import NotBegun
    from shoal.sessions.terminal import converse

    from shoal.cli import cluster  # isort: skip
    from shoal.cli.verbs.forward import target_of  # isort: skip

    if not words:
        raise Failure("JOB: name a running job; list them with: shoal ps", USAGE)
    if len(words) == 1:
        interactive = True
        tty = tty or sys.stdin.isatty()
    with cluster.connect(home) as client:
        target = target_of(client, words[0], None)()
        try:
            command = tuple(words[1:])
            found = converse(
                client,
                Kind.EXEC,
                target,
                command,
                interactive=interactive,
                terminal=tty,
                tell=note,
            )
        except NotBegun as error:
            print_error(str(error))
            return error.code
    if found.why:
        note(found.why)
    return found.code
