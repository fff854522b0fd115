"""`shoal services`, `shoal service` and `shoal serve`: commands behind one URL."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cli.command import Argument, Option, ServeVerb, flag, flags_of, number, verb
from shoal.forms.fields import SERVICE

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.calls.lines import EventLine
    from shoal.cli.cluster import Retry
    from shoal.cli.screen.show import Cell, Spinner
    from shoal.client import Client
    from shoal.model.service import ServiceSpec
    from shoal.model.sites import SiteView
    from shoal.model.tokens import Goals, TokenLoad
    from shoal.model.views import ReplicaView, ServiceView


EVENTS_READ = 1000  # this many of the newest events are searched for the service's own
EVENTS_SHOWN = 12


@verb()
def services(json: bool, home: Path) -> None:
    """List services and their load.

    READY shows the replicas that get requests / the replicas wanted now.
    LATENCY is the time until an answer begins. QUEUED counts the requests that
    wait in the gateway, including those that wait for a first replica.

    Examples:
      shoal services
      shoal services --json | jq -r '.[] | select(.state != "ready") | .why'
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        views = sorted(client.services(), key=lambda view: view.name)
    if json:
        show.as_json(views)
    elif not views:
        show.note("no services yet; start one with: shoal serve NAME -- COMMAND")
    else:
        print_services(views)


@verb(
    Argument("name", "NAME", "A service, e.g. chat."),
    flag("--stop", help="Finish the open requests, then end the service."),
    flag("--rollback", help="Roll out the version before again."),
    Option("--to", metavar="VERSION", type=number(1), help="Roll back to this version."),
)
def service(name: str, stop: bool, rollback: bool, to: int | None, json: bool, home: Path) -> None:
    """Show a service and its replicas, roll it back, or stop it.

    It shows the service's load, its replicas and its last events. NODE lists the
    nodes of all members; the first one answers. With --stop
    the service gets no new requests, answers the open ones, and ends. The
    command does not wait for that. With --rollback the last other version that
    was ready is rolled out as a new one, or with --to one of the last ten. The
    number of replicas stays.

    Examples:
      shoal service chat
      shoal service chat --rollback
      shoal service chat --rollback --to 3
      shoal service chat --json | jq '.replicas[] | {job, state, in_flight}'
      shoal service chat --stop
    """
    from shoal.cli import cluster
    from shoal.forms.failure import USAGE, Failure

    if stop and rollback:
        raise Failure("--rollback: cannot be combined with --stop; give one of them", USAGE)
    if to and not rollback:
        raise Failure("--to: goes with --rollback", USAGE)
    asked = cluster.service_name(name)
    if stop:
        _stop(asked, home, json)
    elif rollback:
        _roll_back(asked, to or 0, home, json)
    else:
        show_service(asked, home, json)


def show_service(name: str, home: Path, json: bool) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        view = cluster.on_service(client, name, lambda c: c.service(name))
        records = [] if json else _last_events(client, view)
    if json:
        show.as_json(view)
    else:
        _print_whole(view, records, int(time.time() * 1000))


def _stop(name: str, home: Path, json: bool) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        if not json:
            cluster.print_preview(client, "stop", [name])
        done = cluster.on_service(client, name, lambda c: c.stop_service(name))
    if json:
        show.as_json(done)
    else:
        show.line(f"{name}: {done.note}" if done.note else f"{name} is being stopped")


def _roll_back(name: str, version: int, home: Path, json: bool) -> None:
    from shoal.cli import cluster
    from shoal.cli.screen import show

    with cluster.connect(home) as client:
        view = cluster.on_service(
            client, name, lambda c: c.roll_back_service(name, version=version)
        )
    if json:
        show.as_json(view)
    else:
        show.line(f"{name} goes back: version {view.version} is being rolled out")


def _last_events(client: Client, view: ServiceView) -> list[EventLine]:
    """The newest events of the service and of its present replicas."""
    from shoal.calls.lines import EventLines
    from shoal.cli.cluster import read_as

    jobs = {replica.job for replica in view.replicas}
    found = []
    asked = {"after": -EVENTS_READ, "limit": EVENTS_READ, "notable": True}
    for record in read_as(EventLines, client.events, **asked).events:
        facts = record.facts
        if facts.service == view.name or facts.job in jobs:
            found.append(record)
    return found[-EVENTS_SHOWN:]


def print_services(views: list[ServiceView], *, reasons: bool = True) -> None:
    from shoal.cli.screen.show import Cell, Column, state_cell, table

    columns = [
        Column("NAME"),
        Column("STATE", rank=2),
        Column("READY", right=True, rank=2),
        Column("VERSION", right=True, rank=-1),
        Column("RPS", right=True, rank=1),
        Column("LATENCY", right=True),
        Column("IN-FLIGHT", right=True, rank=-1),
        Column("QUEUED", right=True, rank=-1),
        Column("URL", whole=True, rank=1),
    ]
    rows: list[list[str | Cell]] = [
        [
            Cell(view.name, "bold"),
            state_cell(view.state),
            f"{view.ready}/{view.wanted}",
            str(view.version),
            f"{view.requests_per_s:.1f}",
            latency_text(view.response_ms, view.requests_per_s),
            str(view.in_flight),
            str(view.queued),
            view.url,
        ]
        for view in views
    ]
    table(columns, rows)
    for view in views if reasons else ():
        if view.state not in ("ready", "idle", "asleep") and view.why:
            _print_why(view.name, view.why)


def _print_why(name: str, why: str) -> None:
    from shoal.cli.screen.show import line

    line(f"{name}: {why}", "dim")


def latency_text(response_ms: int, requests_per_s: float) -> str:
    """A dash if there were no requests to measure."""
    return f"{response_ms}ms" if response_ms or requests_per_s else "-"


def _print_whole(view: ServiceView, records: list[EventLine], now_ms: int) -> None:
    from shoal.cli.screen.show import STATE_STYLES, line
    from shoal.cli.screen.words import replicas_text
    from shoal.model.phrases import command_text

    line(f"{view.name} is {view.state}", STATE_STYLES.get(view.state, "") + " bold")
    if view.why:
        line(f"  {view.why}")
    if view.browser_url not in ("", view.url):
        line(f"  {view.browser_url} (in a browser)")
    if view.url:
        line(f"  {view.url}")
    spec = view.spec
    members = spec.replica.members
    of = (f" of {members} members", " each") if members > 1 else ("", "")
    what = f"{replicas_text(spec.scale)}{of[0]} with {spec.replica.demand}{of[1]}"
    line(f"  version {view.version}: {what}: {command_text(spec.replica.command)}")
    latency = latency_text(view.response_ms, view.requests_per_s)
    failed = f", {view.failed_per_s:.1f}/s failed" if view.failed_per_s else ""
    line(
        f"  {view.ready} of {view.wanted} ready; {view.requests_per_s:.1f} requests/s, "
        f"latency {latency}, {view.in_flight} in flight, {view.queued} queued{failed}"
    )
    if view.tokens is not None:
        for text in _token_lines(view.tokens, spec.goals):
            line(f"  {text}")
    if view.help:
        line("  what would help:")
        for text in view.help:
            line(f"  - {text}")
    if view.replicas:
        line("")
        _print_replicas(view.replicas)
    if view.sites:
        line("")
        _print_sites(view.sites)
    if records:
        line("")
        _print_events(records, now_ms)


def _print_sites(sites: list[SiteView]) -> None:
    from shoal.cli.screen.show import Cell, Column, state_cell, table

    columns = [
        Column("CLUSTER"),
        Column("STATE"),
        Column("GATEWAY"),
        Column("VERSION", right=True),
        Column("READY", right=True),
        Column("WHY", wraps=True),
    ]
    rows: list[list[str | Cell]] = [
        [
            Cell(site.name, "bold"),
            state_cell(site.state or "unknown"),
            Cell(site.address, "dim"),
            str(site.version or "-"),
            str(site.replicas),
            site.why,
        ]
        for site in sites
    ]
    table(columns, rows)


def _token_lines(seen: TokenLoad, goals: Goals) -> list[str]:
    def times(what: str, p50: int, p99: int, goal: int) -> str:
        wanted = f", goal {goal} ms" if goal else ""
        seen = f"{p50} ms, p99 {p99} ms" if p99 else "-"  # no answers in the last seconds
        return f"{what} {seen}{wanted}"

    first = times("time to first token", seen.ttft_p50_ms, seen.ttft_p99_ms, goals.ttft_ms)
    between = times("between tokens", seen.itl_p50_ms, seen.itl_p99_ms, goals.itl_ms)
    good = (
        f"; {100 * seen.good / seen.judged:.1f} % of {seen.judged} requests met the goal, "
        f"{goals.share_milli / 10:g} % should"
        if goals and seen.judged
        else ""
    )
    cached, queued = f"{seen.hit_milli / 10:.0f} % of them cached", f"{seen.queued} queued"
    return [
        f"tokens/s: {seen.prompt_per_s} of prompts, {cached}, {seen.generated_per_s} generated; "
        f"{queued} in the router",
        f"{first}; {between}{good}",
    ]


def _print_replicas(replicas: list[ReplicaView]) -> None:
    from shoal.cli.screen.show import Cell, Column, state_cell, table

    columns = [
        Column("JOB"),
        Column("STATE"),
        Column("NODE"),
        Column("ADDRESS"),
        Column("VERSION", right=True),
        Column("RPS", right=True),
        Column("LATENCY", right=True),
        Column("IN-FLIGHT", right=True),
        Column("WHY", wraps=True),
    ]
    rows: list[list[str | Cell]] = [
        [
            Cell(replica.job, "bold"),
            state_cell(replica.state),
            ",".join(dict.fromkeys(replica.nodes)) or replica.node,
            Cell(replica.address, "dim"),
            str(replica.version),
            f"{replica.requests_per_s:.1f}",
            latency_text(replica.response_ms, replica.requests_per_s),
            str(replica.in_flight),
            replica.why + engine_text(replica),
        ]
        for replica in replicas
    ]
    table(columns, rows)


def engine_text(replica: ReplicaView) -> str:
    engine = replica.engine
    if engine is None:
        return ""
    cache = f"{engine.cache_milli // 10} % of its cache in use"
    return f"; its engine runs {engine.running}, {engine.waiting} wait, {cache}"


def _print_events(records: list[EventLine], now_ms: int) -> None:
    from shoal.cli.screen.show import Cell, Column, table
    from shoal.forms.units import duration_text

    rows: list[list[str | Cell]] = [
        [Cell(f"{duration_text(now_ms - record.facts.at_ms)} ago", "dim"), record.text]
        for record in records
    ]
    table([Column("WHEN", right=True), Column("WHAT", wraps=True)], rows)


# `shoal serve`: runs a command as a service behind one URL, or changes the service.


POLL_S = 0.2
# A new version is rolled back after this many failures. A first version is tried forever, but the
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
    """Serve a command behind one URL, or update a service.

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
      shoal serve chat -g 1 --clusters here,west --pack -- python server.py
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

    because = view.why or "unknown reason"
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
