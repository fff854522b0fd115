"""Verbs that reach into a job: forward, attach, exec, ssh-config, ssh-proxy, ls and cp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, RunVerb, flag, job_word, verb

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.client import Client
    from shoal.model.kept import FilesView


PORT_MAX = 65_535
PORTS_MAX = 32


@verb(
    Argument("words", "JOB[.MEMBER] PORT[:PORT]...", "A job, and its ports.", nargs=-1),
    Option("--service", metavar="NAME", help="A service's newest replica instead of a job."),
)
def forward(words: tuple[str, ...], service: str | None, json: bool, home: Path) -> int:
    """Forward local ports to a running job.

    PORT is the same on both sides; LOCAL:PORT differs, and LOCAL may be 0 for
    any that is free. Without a port, the job's own $PORT is meant. The port
    is open on 127.0.0.1 only, and the connections go through the head, so
    nothing but the API has to be reachable. They reach only ports on which a
    process of that member listens. Ctrl-C ends it. If the job or the head is
    restarted, new connections work again.

    Examples:
      shoal forward j7 8888
      shoal forward j7 0:8888
      shoal forward j7.1 6006 8080:80
      shoal forward --service chat 8000:
    """
    from shoal.cli import cluster
    from shoal.cli.screen.show import note
    from shoal.forms.failure import USAGE, Failure
    from shoal.sessions import Forward

    given = list(words)
    if service is None and not given:
        raise Failure("JOB: name a job, or a service with --service; see: shoal ps", USAGE)
    job = "" if service is not None else given.pop(0)
    ports = [read_ports(word) for word in given] or [(0, 0)]
    if len(ports) > PORTS_MAX:
        raise Failure(f"PORT: at most {PORTS_MAX} at once, not {len(ports)}", USAGE)
    with cluster.connect(home) as client:
        target = target_of(client, job, service)
        name = service or job
        with Forward(client, target, ports, note) as made:
            for local, (_, remote) in zip(made.ports, ports, strict=True):
                show(name, local, remote, made.node, json)
            wait()
    return 0


def target_of(client: Client, job: str, service: str | None) -> Callable[[], tuple[str, int]]:
    """Which job and member are meant, each time a session begins."""
    from shoal.cli import cluster
    from shoal.cli.cluster import named

    if service is not None:
        name = cluster.service_name(service)
        return lambda: (cluster.replica_of(client, name), 0)
    word = cluster.spelled(client, job)
    found = named(word, lambda one: cluster.on_job(client, one, lambda c: c.job(one)))
    return lambda: (found.job, found.member or 0)


def read_ports(word: str) -> tuple[int, int]:
    """The local port and the job's."""
    from shoal.forms import units
    from shoal.forms.failure import USAGE, Failure

    local, colon, remote = word.partition(":")
    parts = [local, remote] if colon else [local, local]
    if not all((part.isdecimal() and int(part[:6]) <= PORT_MAX) or not part for part in parts):
        raise Failure(
            f"PORT: {units.quoted(word)} is not a port like 8888, or two like 8080:80", USAGE
        )
    return int(parts[0] or 0), int(parts[1] or 0)


def show(name: str, local: int, remote: int, node: str, json: bool) -> None:
    if json:
        from shoal.cli.screen.show import as_json

        found = {"address": f"127.0.0.1:{local}", "job": name, "port": remote, "node": node}
        as_json(found, lines=True)
        return
    where = f"port {remote}" if remote else "$PORT"
    print(f"http://127.0.0.1:{local} -> {where} of {name} on {node}", flush=True)


def wait() -> None:
    """Until Ctrl-C."""
    import signal
    import threading

    over = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: over.set())
    try:
        while not over.wait(3600):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


# `shoal attach`: the terminal of an interactive job.


LOOK_S = 10.0
ENTERED = ("running", "dozing", "asleep", "waking")  # a session can begin; a sleeper is woken


@verb(Argument("job", "JOB[.MEMBER]", "An interactive job."))
def attach(job: str, json: bool, home: Path) -> int:  # noqa: ARG001
    """Attach to the terminal of an interactive job.

    The job was submitted with --interactive, or with `shoal run -it`. You see
    its recent output and what follows, and what you type is its input. Several
    users may be attached at once. Ctrl-P Ctrl-Q, or ~. at the start of a line,
    detaches; the job keeps running. The exit code is the job's own. Its output is
    in its log, as that of every job.

    Examples:
      shoal attach j7
      shoal attach j7.1
    """
    from shoal.cli import cluster

    with cluster.connect(home) as client:
        target = target_of(client, job, None)()
    return join_terminal(target, home)


def follow_terminal(job: str, home: Path) -> int:
    """When it runs."""
    from shoal.cli.cluster import Retry
    from shoal.cli.screen.show import note

    with Retry(home) as retry:
        view = retry(lambda client: client.job(job, wait_for="running", wait_s=1))
        if view.finished_ms is None and view.state not in ENTERED:
            note(
                f"[{job} is {view.state}: {view.why}; Ctrl-C leaves it, shoal attach {job} returns]"
            )
        while view.finished_ms is None and view.state not in ENTERED:
            view = retry(lambda client: client.job(job, wait_for="running", wait_s=LOOK_S))
    return join_terminal((job, 0), home)


def join_terminal(target: tuple[str, int], home: Path) -> int:
    from shoal.cli import cluster
    from shoal.cli.screen.show import note
    from shoal.model.session import Kind
    from shoal.sessions.terminal import converse

    with cluster.connect(home) as client:
        found = converse(client, Kind.ATTACH, target, interactive=True, terminal=True, tell=note)
    if found.detached:
        note("")  # the line that the terminal was in
        note(f"[detached; {target[0]} keeps running: shoal attach {target[0]}]")
    elif found.why:
        note(found.why)
    return found.code


# `shoal exec`: a command beside a running job, in the same surroundings.


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
    """Run a command inside a running job.

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


# `shoal ssh-config` and `shoal ssh-proxy`: ssh, scp and editors reach jobs through the API.


PREFIX = "shoal-"


@verb(flag("--write", help="Write the entry and the keys, and have ssh read them."))
def ssh_config(write: bool, json: bool, home: Path) -> None:
    """Print or write ssh entries for running jobs.

    With --write, `ssh shoal-j7` opens a shell beside job j7, and `shoal-j7.1`
    is its member 1. scp, sftp, rsync, port forwarding, VS Code and PyCharm
    work with the same names. Nothing but the API has to be reachable. The
    entry is for the cluster that this command uses. The nodes need asyncssh:
    pip install 'shoal[ssh]'.

    Examples:
      shoal ssh-config --write
      ssh shoal-j7
      scp results.csv shoal-j7:
      ssh -L 8888:localhost:8888 shoal-j7
    """
    from shoal.cli.screen.show import as_json
    from shoal.machine.files import write_private
    from shoal.sessions import sshkeys

    text, done = sshkeys.entry(proxy(home)), []
    config, own = Path.home() / ".ssh" / "config", sshkeys.folder() / "config"
    if write:
        sshkeys.keys()
        write_private(own, text.encode())
        done.append(str(own))
        if sshkeys.include(config, own):
            done.append(str(config))
    if json:
        as_json({"entry": text, "written": done})
    elif not write:
        print(text, end="")
    else:
        print(f"written: {', '.join(done)}; try: ssh {PREFIX}JOB")


def proxy(home: Path) -> str:
    """The command that ssh runs, with the cluster that is in use now. Editors that call ssh may
    have another PATH, so it names the interpreter."""
    import shlex
    import sys

    from shoal.cli.cluster import context_in_use

    context = context_in_use()
    which = ["--context", context] if context else ["--home", str(home)]
    return shlex.join([sys.executable, "-m", "shoal.main", *which, "ssh-proxy"])


@verb(Argument("name", "NAME", "shoal-JOB or shoal-JOB.MEMBER."))
def ssh_proxy(name: str, json: bool, home: Path) -> int:  # noqa: ARG001
    """Connect ssh to a running job; used by ssh-config.

    It passes bytes between its own input and output and an SSH server for this
    connection, on the job's node.

    Examples:
      shoal ssh-proxy shoal-j7
    """
    from shoal.cli import cluster
    from shoal.cli.screen.show import note
    from shoal.sessions import sshkeys
    from shoal.sessions.terminal import relay

    found = sshkeys.keys()
    with cluster.connect(home) as client:
        target = target_of(client, name.removeprefix(PREFIX), None)()
        return relay(client, target, note, public_key=found.public, host_key=found.host)


# `shoal ls`: the files that a job has kept.


@verb(
    Argument("job", "JOB", "A job's id or name.", type=job_word),
    Argument("path", "[PATH]", "Only this file or folder. [all]", required=False, default=""),
    flag("--checkpoints", help="Its checkpoints that were copied to the head instead."),
)
def ls(job: str, path: str, checkpoints: bool, json: bool, home: Path) -> None:
    """List the files that a job has kept.

    These are the files that the job wrote to the folder $SHOAL_OUTPUT. They are
    copied to the head while the job runs, so they are there after its node has died.
    Files of finished jobs are removed after 30 days, or earlier if the store is full.

    Examples:
      shoal ls j7
      shoal ls j7 runs
      shoal ls j7 --json
      shoal ls j7 --checkpoints
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.model.kept import Kind

    kind = Kind.CHECKPOINT if checkpoints else Kind.OUTPUT
    with cluster.connect(home) as client:
        asked = cluster.job_id(client, job)
        view = cluster.on_job(client, asked, lambda c: c.files(asked, path, kind=kind))
        array = not view.files and client.job(asked).array is not None
    if json:
        show.as_json(view)
    elif array:
        show.note(f"{asked} is an array: its elements keep the files; name one, as {asked}.3")
    else:
        _show(view, path)


def _show(view: FilesView, path: str) -> None:
    import time

    from shoal.cli.screen.files import size_text
    from shoal.cli.screen.show import Column, note, table

    if view.files:
        columns = (Column("SIZE", right=True), Column("WRITTEN"), Column("PATH"))
        rows = [
            (
                size_text(file.size),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(file.modified_ms / 1000)),
                file.path,
            )
            for file in view.files
        ]
        table(columns, rows)
        if len(view.files) > 1:
            note(f"{len(view.files)} files, {size_text(view.total_bytes)}")
        if view.held_by:
            note(f"{len(view.held_by)} copies, on {', '.join(view.held_by)}")
        if view.encrypted:
            note("encrypted: shoal cp decrypts them with the tenant's key")
    elif path:
        note(f"{view.job} has kept no files at {path}")
    else:
        hint = "; it may still write some" if view.live else ""
        note(f"{view.job} has kept no files: it wrote none to $SHOAL_OUTPUT{hint}")
    for text in view.notes:
        note(f"not kept: {text}")


# `shoal cp`: files of a job to this machine, and files of this machine into a running job.


@verb(
    Argument("source", "SOURCE", "JOB:PATH, or a file of this machine."),
    Argument("target", "TARGET", "A place on this machine, or JOB:PATH."),
    flag("--recursive", "-r", help="Copy a folder with everything in it."),
    flag("--checkpoints", help="From the job's checkpoints that were copied to the head."),
)
def cp(
    source: str, target: str, recursive: bool, checkpoints: bool, json: bool, home: Path
) -> None:
    """Copy files to or from a job.

    From a job: files that it has kept. Paths are those of `shoal ls`, relative to
    the job's $SHOAL_OUTPUT. A file has its name here only when it is whole. If the
    copy is interrupted, the same command continues it.

    To a job, which must be running: paths are relative to its working directory,
    and files belong to the job's user. JOB.MEMBER names a member of a gang.

    Examples:
      shoal cp j7:model.pt .
      shoal cp -r j7:runs results/
      shoal cp -r j7: results/
      shoal cp config.yaml j7:
      shoal cp -r data j7:/scratch/data
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.cli.screen.files import Fetch, is_remote, remote, send, size_text
    from shoal.forms.failure import USAGE, Failure
    from shoal.model.kept import Kind

    if is_remote(target):
        if is_remote(source) or checkpoints:
            raise Failure("SOURCE: must be a file of this machine if the target is a job", USAGE)
        with cluster.connect(home) as client, show.Spinner(quiet=json) as spinner:
            made = send(client, Path(source), target, spinner, recursive=recursive)
    else:
        word, path = remote(source)
        kind = Kind.CHECKPOINT if checkpoints else Kind.OUTPUT
        with cluster.Retry(home) as retry, show.Spinner(quiet=json) as spinner:
            job = retry(lambda client: cluster.job_id(client, word))
            view = retry(
                lambda client: cluster.on_job(client, job, lambda c: c.files(job, path, kind=kind))
            )
            fetch = Fetch(retry, job, kind, spinner)
            made = fetch.all(
                view, path, Path(target), recursive=recursive, folder=target.endswith("/")
            )
    if json:
        show.as_json({"files": made.files, "bytes": made.size, "to": str(made.place)})
    else:
        what = "1 file" if made.files == 1 else f"{made.files} files"
        show.line(f"{what}, {size_text(made.size)}: {made.place}", "green")
