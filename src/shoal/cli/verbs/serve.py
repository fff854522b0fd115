"""`shoal serve`: a command becomes a service behind one URL, or the service becomes another."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption

if TYPE_CHECKING:
    from shoal.cli.reach import Steady
    from shoal.cli.screen.show import Progress
    from shoal.model.service import ServiceSpec
    from shoal.model.views import ServiceView

POLL_S = 0.2
# A new version goes back after as many; one that has nothing to go back to is tried for ever, but
# nobody should have to watch it.
FAILURES_MAX = 3
HOPELESS_S = 10.0  # longer than the pauses between the first few tries

# The headings of the help page.
FLEET = "How many, and when they are ready"
REQUESTS = "How requests reach them"
REPLICA = "What a replica is"


def _flag(heading: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=heading)


def serve(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME -- COMMAND...", help="A name and what to run, or one service file."
        ),
    ],
    replicas: Annotated[
        str | None,
        _flag(FLEET, "2, or 1..8, or 0..4 to sleep when idle. [1]", "--replicas", metavar="N"),
    ] = None,
    target: Annotated[
        int | None,
        _flag(FLEET, "Requests at a replica at a time. [8]", "--target", metavar="N"),
    ] = None,
    idle: Annotated[
        str | None,
        _flag(FLEET, "Of 0..N: to none after so long. [5m]", "--idle", metavar="TIME"),
    ] = None,
    probe: Annotated[
        str | None,
        _flag(FLEET, "Ready when this answers below 500. [/]", "--probe", metavar="PATH"),
    ] = None,
    ready_within: Annotated[
        str | None,
        _flag(FLEET, "It must be ready by then. [10m]", "--ready-within", metavar="TIME"),
    ] = None,
    probe_every: Annotated[
        str | None,
        _flag(FLEET, "Then it is asked so often. [10s]", "--probe-every", metavar="TIME"),
    ] = None,
    probe_failures: Annotated[
        int | None,
        _flag(FLEET, "Replaced after so many without answer. [6]", "--probe-failures", metavar="N"),
    ] = None,
    drain: Annotated[
        str | None,
        _flag(FLEET, "So long to finish what it has. [60s]", "--drain", metavar="TIME"),
    ] = None,
    route: Annotated[
        str | None,
        _flag(
            REQUESTS,
            "least-loaded, p2c, prefix or sticky. [least-loaded]",
            "--route",
            metavar="HOW",
        ),
    ] = None,
    sticky_header: Annotated[
        str | None,
        _flag(REQUESTS, "The same replica for the same one.", "--sticky-header", metavar="H"),
    ] = None,
    sticky_cookie: Annotated[
        str | None,
        _flag(REQUESTS, "The same replica for the same one.", "--sticky-cookie", metavar="C"),
    ] = None,
    queue: Annotated[
        int | None,
        _flag(REQUESTS, "So many may wait; then 503. [1000]", "--queue", metavar="N"),
    ] = None,
    rate: Annotated[
        int | None,
        _flag(REQUESTS, "Per tenant and second; then 429. [any]", "--rate", metavar="N"),
    ] = None,
    port: Annotated[
        int | None,
        _flag(REQUESTS, "A port of its own, besides the path.", "--port", metavar="P"),
    ] = None,
    certificate: Annotated[
        str | None,
        _flag(REQUESTS, "TLS on that port: certificate and key.", "--certificate", metavar="PEM"),
    ] = None,
    gpus: Annotated[
        str | None,
        _flag(REPLICA, "GPUs of each: 2, or 0.5, or 20G. [0]", "--gpus", "-g", metavar="G"),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        _flag(REPLICA, "Only GPUs with so much memory.", "--gpu-memory", metavar="SIZE"),
    ] = None,
    gpu_model: Annotated[
        list[str] | None,
        _flag(REPLICA, "Only this model; again: or this one.", "--gpu-model", metavar="MODEL"),
    ] = None,
    cpus: Annotated[
        str | None, _flag(REPLICA, "CPUs of each, e.g. 4 or 0.5. [1]", "--cpus", metavar="C")
    ] = None,
    memory: Annotated[
        str | None,
        _flag(REPLICA, "Memory of each, e.g. 512M or 4G.", "--memory", metavar="SIZE"),
    ] = None,
    tenant: Annotated[
        str | None,
        _flag(REPLICA, "On whose account it runs. [default]", "--tenant", metavar="NAME"),
    ] = None,
    priority: Annotated[
        int | None,
        _flag(REPLICA, "Higher goes first. [100; jobs: 0]", "--priority", metavar="P"),
    ] = None,
    stop_grace: Annotated[
        str | None,
        _flag(REPLICA, "From SIGTERM to SIGKILL. [10s]", "--stop-grace", metavar="TIME"),
    ] = None,
    env: Annotated[
        list[str] | None,
        _flag(REPLICA, "A variable; K alone copies it from here.", "--env", metavar="K=V"),
    ] = None,
    workdir: Annotated[
        str | None,
        _flag(REPLICA, "Where to run. [the current directory]", "--workdir", metavar="DIR"),
    ] = None,
    requirements: Annotated[
        str | None,
        _flag(REPLICA, "What pip shall install for it.", "--requirements", metavar="FILE"),
    ] = None,
    pack: Annotated[
        bool | None,
        _flag(REPLICA, "Send the folder along. [if nodes are elsewhere]", "--pack/--no-pack"),
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return at once.")] = False,
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Serve a command behind one URL, or change how.

    Each replica is a job, any HTTP server that listens on $PORT, a variable
    of its environment. It gets requests when its probe answers. There are as many replicas as
    keep about --target requests at each, within the range of --replicas; they
    come before training, which gives room up and gets it back.

    The same name again changes the service: new replicas replace the old ones
    with no request failed. If the new version does not get ready, the old one
    goes on and this command fails.

    Instead of a name and a command, a file ending in .yaml, .toml or .json may
    describe the service. Its fields are named as the flags (name, command,
    replicas, ready_within, ...); flags override them; a relative workdir or
    certificate in it is meant from the file's folder.

    It waits until the service is ready and prints its URL. Ctrl-C stops the
    waiting, not the service.

    Examples:
      shoal serve chat --replicas 1..8 --gpus 1 -- python server.py
      shoal serve site --cpus 0.5 -- sh -c 'exec python -m http.server $PORT'
      shoal serve llm -g 1 --route prefix --ready-within 20m -- \\
        sh -c 'exec vllm serve MODEL --port $PORT'
      shoal serve service.yaml --replicas 2
      curl $(shoal serve chat -- python server.py)v1/models
    """
    given = locals()  # before anything else has a name here
    from shoal.cli import reach
    from shoal.cli.request import assemble
    from shoal.forms.request import SERVICE

    spec, pack = assemble(SERVICE, words, given, _from_words)
    view = _ask(spec, pack, home, quiet=json)
    if not no_wait:
        with reach.Steady(home) as steady:
            view = _wait(steady, view, quiet=json)
    _print(view, json)


def _ask(spec: ServiceSpec, pack: bool | None, home: Path, *, quiet: bool) -> ServiceView:
    import msgspec

    from shoal.cli import reach
    from shoal.cli.screen import show
    from shoal.forms.pack import packed

    with reach.connect(home) as client:
        replica = packed(client, spec.replica, pack, None if quiet else show.note)
        return client.serve(msgspec.structs.replace(spec, replica=replica))


def _from_words(words: list[str]) -> dict[str, Any]:
    from shoal.forms.failure import USAGE, Failure
    from shoal.forms.units import quoted

    if len(words) == 1:
        like = "say what to run after --, e.g. shoal serve chat -- python server.py"
        raise Failure(f"COMMAND of {quoted(words[0])} is missing; {like}", USAGE)
    return {"name": words[0], "command": words[1:]}


def _wait(steady: Steady, view: ServiceView, quiet: bool) -> ServiceView:
    """Until it is ready, or it is known that this version will not be."""
    from shoal.cli.guard import INTERRUPTED
    from shoal.cli.screen import show

    name, doubt = view.name, Doubt(view.version)
    try:
        with show.Progress(quiet) as progress:
            while not _settled(view, doubt):
                _tell(progress, view)
                time.sleep(POLL_S)
                view = steady(lambda client: client.service(name))
    except KeyboardInterrupt:
        show.note(f"[{name} goes on; see: shoal service {name}]")
        raise typer.Exit(INTERRUPTED) from None
    return view


class Doubt:
    """Whether a version that fails may still get ready: not after some failures, and not if
    nothing is being tried."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._reasons: set[str] = set()
        self._idle_since: float | None = None

    def hopeless(self, view: ServiceView) -> bool:
        if view.state != "failing":
            self._idle_since = None
            return False
        self._reasons.add(view.why)  # each names the replica that failed
        tried = [
            replica
            for replica in view.replicas
            if replica.version == self.version and replica.state in ("waiting", "starting")
        ]
        now = time.monotonic()
        if tried or self._idle_since is None:
            self._idle_since = now
        return len(self._reasons) >= FAILURES_MAX or now - self._idle_since > HOPELESS_S


def _settled(view: ServiceView, doubt: Doubt) -> bool:
    """Raises if it will not become what was asked for."""
    from shoal.forms.failure import Failure

    because = view.why or "it does not say why"
    if view.version != doubt.version:
        raise Failure(f"{view.name} is version {view.version}, not {doubt.version}: {because}")
    if view.state == "stopping" or doubt.hopeless(view):
        raise Failure(f"{view.name} is {view.state}: {because}")
    return view.state in ("ready", "idle")


def _tell(progress: Progress, view: ServiceView) -> None:
    why = f": {view.why}" if view.why else ""
    progress(f"{view.name} is {view.state}, {view.ready} of {view.wanted} ready{why}")


def _print(view: ServiceView, json: bool) -> None:
    from shoal.cli.screen.show import as_json, at_terminal, line

    if json:
        as_json(view)
        return
    if not at_terminal():
        print(view.url)
        return
    line(f"{view.name} is {view.state} at {view.url}", "bold")
    line(f"look at it with: shoal service {view.name}", "dim")
