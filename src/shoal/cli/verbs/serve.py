"""`shoal serve`: runs a command as a service behind one URL, or changes the service."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shoal.cli.command import Argument, ServeVerb, flag, verb
from shoal.cli.flags import flags_of
from shoal.forms.fields import SERVICE

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.cli.cluster import Retry
    from shoal.cli.screen.show import Spinner
    from shoal.model.service import ServiceSpec
    from shoal.model.views import ServiceView

POLL_S = 0.2
# A new version is rolled back after this many failures. A first version is tried for ever, but the
# user should not have to watch that.
SHELLS = ("sh", "bash", "dash", "zsh", "fish", "ksh", "env")
FAILURES_MAX = 3
HOPELESS_S = 10.0  # longer than the pauses between the first few attempts


@verb(
    Argument(
        "words",
        "NAME -- COMMAND...",
        "The service's name and the command, or one service file.",
        nargs=-1,
        required=True,
    ),
    *flags_of(SERVICE),
    flag("--no-wait", help="Return at once."),
    cls=ServeVerb,
)
def serve(words: tuple[str, ...], no_wait: bool, json: bool, home: Path, **flags: Any) -> int:
    """Serve a command behind one URL, or change a service.

    Each replica is a job that runs any HTTP server which listens on $PORT, a variable
    of its environment. It gets requests when its probe answers. Within the range of
    --replicas there are enough replicas to keep about --target requests at each.
    Services come before training jobs, which give up room and get it back later.

    The same name again changes the service: new replicas replace the old ones without
    a failed request. If the new version does not become ready, the old one stays and
    this command fails.

    A replica may be a gang over several nodes: --members 2 --per-node 1. Member 0
    answers on $PORT; all members find each other by MASTER_ADDR, MASTER_PORT and RANK.
    If there is no room for new replicas beside the old ones, --rollout replace drains
    an old one first.

    A file that ends in .yaml, .toml or .json can describe the service instead. Its
    fields have the names of the flags (name, command, replicas, ready_within, ...).
    Flags override the file. A relative path in it counts from the file's folder.

    It waits until the service is ready and prints its URLs: at a terminal first the one
    for browsers, else only the one for programs. Ctrl-C stops the waiting, not the
    service.

    Examples:
      shoal serve chat --replicas 1..8 --gpus 1 -- python server.py
      shoal serve site --cpus 0.5 -- sh -c 'exec python -m http.server $PORT'
      shoal serve llm -g 1 --route prefix --probe openai --ready-within 20m -- \\
        sh -c 'exec vllm serve MODEL --port $PORT'
      shoal serve large --members 2 --per-node 1 -g 8 --rollout replace -- ./serve.sh
      shoal serve draft -g 1 --sleep-after 10m -- python server.py
      shoal serve service.yaml --replicas 2
      curl $(shoal serve chat -- python server.py)v1/models
    """
    from shoal.cli import cluster
    from shoal.cli.request import assemble
    from shoal.forms import request

    spec, pack = assemble(request.SERVICE, list(words), flags, _from_words)
    view = _ask(spec, pack, home, quiet=json)
    try:
        if not no_wait:
            with cluster.Retry(home) as retry:
                view = _wait(retry, view, quiet=json)
    except KeyboardInterrupt:
        from shoal.cli.errors import INTERRUPTED
        from shoal.cli.screen import show

        show.note(f"[{view.name} keeps running; see: shoal service {view.name}]")
        return INTERRUPTED
    _print(view, json)
    return 0


def _ask(spec: ServiceSpec, pack: bool | None, home: Path, *, quiet: bool) -> ServiceView:
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.forms.pack import packed_service, require_certificate

    require_certificate(spec)  # before anything else fails
    if not quiet and _unexpanded(spec.replica.command):
        show.note("[no shell runs the command, so $PORT stays as it is; use: sh -c '... $PORT']")
    with cluster.connect(home) as client:
        return client.submit_service(
            packed_service(client, spec, pack, None if quiet else show.note)
        )


def _unexpanded(command: tuple[str, ...]) -> bool:
    """Whether a word names the port as a shell would, and no shell is there to replace it."""
    shell = command[0].rpartition("/")[2] in SHELLS
    return not shell and any("$PORT" in word or "${PORT}" in word for word in command)


def _from_words(words: list[str]) -> dict[str, Any]:
    from shoal.forms.failure import USAGE, Failure
    from shoal.forms.units import quoted

    if len(words) == 1:
        fix = "say what to run after --, e.g. shoal serve chat -- python server.py"
        raise Failure(f"COMMAND of {quoted(words[0])} is missing; {fix}", USAGE)
    return {"name": words[0], "command": words[1:]}


def _wait(retry: Retry, view: ServiceView, quiet: bool) -> ServiceView:
    """Returns when the service is ready; fails when this version will not be."""
    from shoal.cli.screen import show

    name, doubt = view.name, Doubt(view.version)
    with show.Spinner(quiet) as progress:
        while not _settled(view, doubt):
            _show(progress, view)
            time.sleep(POLL_S)
            view = retry(lambda client: client.service(name))
    return view


class Doubt:
    """Decides whether a failing version may still become ready: not after several failures, and
    not if no replica is starting."""

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
    """True if the service is ready; raises if this version will not be."""
    from shoal.forms.failure import Failure

    because = view.why or "the reason is not known"
    if view.version != doubt.version:
        raise Failure(f"{view.name} is version {view.version}, not {doubt.version}: {because}")
    if view.state == "stopping" or doubt.hopeless(view):
        raise Failure(f"{view.name} is {view.state}: {because}")
    return view.state in ("ready", "idle", "asleep")


def _show(progress: Spinner, view: ServiceView) -> None:
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
    line(f"{view.name} is {view.state}", "bold")
    if view.browser_url:
        line(f"in a browser: {view.browser_url}")
    if view.browser_url != view.url:
        line(f"for programs: {view.url}")
    if not view.browser_url:
        line(f"a page with absolute links needs --path /{view.name}, --port or --host", "dim")
    line(f"look at it with: shoal service {view.name}", "dim")
