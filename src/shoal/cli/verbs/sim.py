"""`shoal sim`: replay a trace, or this cluster's own history, under other policies."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, number, verb
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from shoal.cli.screen.show import Spinner
    from shoal.model.ledger import PriceList
    from shoal.model.node import NodeSpec
    from shoal.model.policy import Policy
    from shoal.model.supply import Supply
    from shoal.sim.replay.clusters import Conditions
    from shoal.sim.replay.metrics import Outcome, Summary
    from shoal.sim.replay.readers.history import History
    from shoal.sim.replay.traces import Trace


DEFAULT_GPUS = 8


@verb(
    Argument("trace", "[TRACE]", "A file of jobs, plain or .gz.", type=Path, required=False),
    Option("--nodes", "-n", metavar="N|CSV", default="", help="Number of nodes, or a CSV list."),
    Option(
        "--gpus",
        "-g",
        metavar="N",
        type=number(0, 256),
        default=DEFAULT_GPUS,
        help=f"GPUs per node. [{DEFAULT_GPUS}]",
    ),
    Option("--cpus", metavar="N", default="", help="CPUs per node. [unlimited]"),
    Option("--memory", metavar="SIZE", default="", help="Memory per node; needs --cpus."),
    Option(
        "--policy",
        "-p",
        metavar="NAME",
        multiple=True,
        help="A shipped policy or a file; may be repeated. [fair]",
    ),
    flag("--history", help="Replay this cluster's own history, on its own nodes."),
    Option(
        "--days",
        metavar="N",
        type=number(0),
        default=0,
        help="Only the last N days of the history. [all]",
    ),
    Option("form", "--format", metavar="NAME", default="", help="The trace's format. [detected]"),
    Option("--where", metavar="COLUMN=VALUE", multiple=True, help="Only these rows of the trace."),
    Option(
        "--jobs",
        metavar="N",
        type=number(0),
        default=0,
        help="Replay N jobs; repeat the trace if it is shorter. [all, once]",
    ),
    Option("--load", metavar="X", default="1", help="Jobs arrive X times as fast. [1]"),
    Option("--scale", metavar="X", default="1", help="X times as many jobs in the same time. [1]"),
    Option("--start-up", metavar="TIME", default="10s", help="From placement to work. [10s]"),
    Option(
        "--checkpoint",
        metavar="TIME",
        default="10m",
        help="Time between checkpoints, or never. [10m]",
    ),
    Option(
        "--restart-cost", metavar="TIME", default="30s", help="Time to load a checkpoint. [30s]"
    ),
    Option(
        "--failures",
        metavar="RATE|CSV",
        default="0",
        help="Failures per 1000 node-days, or a table of causes. [0]",
    ),
    Option("--repair", metavar="TIME", default="4h", help="Time to repair a failed node. [4h]"),
    Option("--slow", metavar="SHARE:SPEED", default="", help="Slow nodes, e.g. 0.05:0.7."),
    Option("--stragglers", metavar="SHARE:SPEED", default="", help="Slow attempts of jobs."),
    flag("--sleep", help="Replay each policy without and with sleep: what would it save?"),
    Option(
        "--clusters",
        metavar="FILE",
        default="",
        help="Replay over several clusters, without and with spilling between them.",
    ),
    flag("--skip-too-large", help="Leave out jobs that do not fit on this cluster."),
    Option("--seed", metavar="N", type=number(), default=0, help="Seed of all random numbers. [0]"),
    Option(
        "--check",
        metavar="N",
        type=number(0),
        default=0,
        help="Verify the invariants every N steps. [never]",
    ),
    Option("--html", metavar="FILE", type=Path, help="Also write a page with plots."),
    Option("--prices", metavar="FILE", default="", help="Price list. [the cluster's]"),
)
def sim(
    trace: Path | None,
    nodes: str,
    gpus: int,
    cpus: str,
    memory: str,
    policy: tuple[str, ...],
    history: bool,
    days: int,
    form: str,
    where: tuple[str, ...],
    jobs: int,
    load: str,
    scale: str,
    start_up: str,
    checkpoint: str,
    restart_cost: str,
    failures: str,
    repair: str,
    slow: str,
    stragglers: str,
    sleep: bool,
    clusters: str,
    skip_too_large: bool,
    seed: int,
    check: int,
    html: Path | None,
    prices: str,
    json: bool,
    home: Path,
) -> None:
    """Replay a trace or your own history under other policies.

    The replay uses the real scheduler. Only the machines are simulated:
    start-up times, checkpoints, failures and slow nodes. The same command gives
    the same figures again. A plain trace is a CSV file with the columns
    submit_s, duration_s and gpus. The output of sacct is recognized by its
    columns. docs/simulate.md explains each figure.

    Examples:
      shoal sim jobs.csv --nodes 8 --gpus 8
      shoal sim jobs.csv --nodes 8 --policy fifo --policy fair --html report.html
      shoal sim jobs.csv --nodes 8 --load 1.5 --failures 4
      shoal sim --history --days 30 --policy fair
      shoal sim --history --sleep
      shoal sim jobs.csv --clusters clusters.yaml
      shoal sim jobs.csv.gz --nodes 64 --where vc=6214e9 --json | jq .policies[0].wait
    """
    from shoal.cli.screen import show
    from shoal.cli.screen.sim_tables import print_figures
    from shoal.cli.sim_flags import conditions_of, factor, saved_by_sleep, with_sleep
    from shoal.sim.replay.metrics import as_it_was, summarize
    from shoal.sim.replay.replay import replay
    from shoal.sim.replay.traces import TraceError, stretch

    chosen = [(name, policy_named(name)) for name in dict.fromkeys(policy or ("fair",))]
    conditions = conditions_of(
        start_up, checkpoint, restart_cost, failures, repair, slow, stragglers
    )
    brought = [supply for _, one in chosen for supply in one.supply]
    factors = factor(load, "--load"), factor(scale, "--scale")
    sized = partial(stretch, jobs=jobs, load=factors[0], scale=factors[1], seed=seed)
    if clusters:
        given = nodes, gpus != DEFAULT_GPUS, cpus, memory, history, days, sleep, html, prices
        over = partial(_several, clusters, trace, form, where, sized, skip_too_large, chosen)
        over(conditions, seed, check, json, given)
        return
    paid = prices_of(prices, home, history)
    play = partial(replay, conditions=conditions, seed=seed, check_every=check, prices=paid)
    _need_plots(html)
    try:
        if history:
            if trace is not None:
                raise Failure("--history: takes no TRACE; leave one of them out", USAGE)
            cluster, played = _history(home, nodes, gpus, cpus, memory, days, json, brought)
        else:
            if days:
                raise Failure("--days: works only with --history", USAGE)
            cluster, played = _trace(trace, nodes, gpus, cpus, memory, form, where, brought)
        if sleep:
            chosen, cluster = with_sleep(chosen, cluster)
        if not cluster and not all(one.supply for _, one in chosen):
            raise Failure("--nodes: 0 is possible only if each --policy has a supply", USAGE)
        lived = as_it_was(played.arrivals) if not jobs and factors == (1, 1) else None
        played = sized(played)
        for _, one in chosen:
            played = _fitting(played, cluster, one, skip_too_large)
        outcomes = _outcomes(chosen, partial(play, played, cluster), len(played.arrivals), json)
    except TraceError as error:
        raise Failure(str(error), REFUSED) from error
    summaries = [summarize(outcome) for outcome in outcomes]
    if html is not None:
        _write_page(html, played, cluster, outcomes, summaries)
    if json:
        was = {"as_it_was": lived} if lived is not None else {}
        saves = {"sleep": saved_by_sleep(summaries)} if sleep else {}
        show.as_json({**_document(played, cluster, seed, summaries), **saves, **was})
        return
    print_figures(played, cluster, summaries, lived, saved_by_sleep(summaries) if sleep else [])
    if html is not None:
        show.note(f"wrote {html}")


def _write_page(
    html: Path,
    played: Trace,
    cluster: list[NodeSpec],
    outcomes: list[Outcome],
    summaries: list[Summary],
) -> None:
    from shoal.sim.replay.report import page

    html.write_text(page(played, cluster, outcomes, summaries), encoding="utf-8")


def _outcomes(
    chosen: list[tuple[str, Policy]], play: Callable[..., Outcome], jobs: int, quiet: bool
) -> list[Outcome]:
    from shoal.cli.screen.show import Spinner

    outcomes = []
    for name, one in chosen:
        with Spinner(quiet=quiet) as progress:
            outcomes.append(play(one, name=name, progress=watcher(progress, name, jobs)))
    return outcomes


def policy_named(name: str) -> Policy:
    """A shipped policy, or one from a file."""
    from shoal.forms.policy import find

    return find(name, flag="--policy")


def _several(
    clusters: str,
    trace: Path | None,
    form: str,
    where: tuple[str, ...],
    sized: Callable[[Trace], Trace],
    skip: bool,
    chosen: list[tuple[str, Policy]],
    conditions: Conditions,
    seed: int,
    check: int,
    json: bool,
    given: tuple[object, ...],
) -> None:
    """Each policy over the clusters of the file, without and with spilling. `given`: flags that do
    not go with it."""
    from shoal.cli.screen import show
    from shoal.cli.screen.sim_tables import print_figures
    from shoal.cli.sim_clusters import play, print_clusters, refuse
    from shoal.forms.clusters import read
    from shoal.sim.replay.several import divided
    from shoal.sim.replay.traces import TraceError

    refuse(given)
    try:
        sites = read(clusters)
        brought = [supply for _, one in chosen for supply in one.supply]
        if trace is None:
            raise Failure("TRACE is missing: name a file of jobs", USAGE)
        nodes = [site.nodes for site in sites.sites]
        smallest = min(nodes, key=lambda of: max(node.gpus for node in of))
        whole = sized(_read(trace, [*smallest, *brought], form, where))
        parts = divided(whole, sites, seed)
        for _, policy in chosen:
            named = zip(parts, sites.sites, strict=True)
            parts = [_fitting(part, site.nodes, policy, skip) for part, site in named]
        with show.Spinner(quiet=json) as progress:
            total = len(whole.arrivals)
            watch = partial(watcher, progress, total=total)
            played = play(sites, parts, chosen, conditions, seed, check, watch)
    except TraceError as error:
        raise Failure(str(error), REFUSED) from error
    if json:
        document = _document(whole, sites.nodes, seed, played.summaries)
        more = {"clusters": played.clusters, "spilling": played.spilling}
        show.as_json({**document, **more})
        return
    print_figures(whole, sites.nodes, played.summaries, None, [])
    print_clusters(played)
    for one in played.spilling:
        show.note(one.text)


def _trace(
    trace: Path | None,
    nodes: str,
    gpus: int,
    cpus: str,
    memory: str,
    form: str,
    where: tuple[str, ...],
    brought: list[Supply],
) -> tuple[list[NodeSpec], Trace]:
    from shoal.cli.sim_flags import cluster_of

    if trace is None:
        raise Failure("TRACE is missing: name a file of jobs, or use --history", USAGE)
    if not nodes:
        raise Failure("--nodes is missing: give a number, or a CSV file with a row per node", USAGE)
    cluster = cluster_of(nodes, gpus, cpus, memory)
    if not cluster and not brought:
        raise Failure("--nodes: must be at least 1, because the policy has no supply", USAGE)
    return cluster, _read(trace, [*cluster, *brought], form, where)


def _read(
    trace: Path, nodes: Sequence[NodeSpec | Supply], form: str, where: tuple[str, ...]
) -> Trace:
    from shoal.sim.replay.clusters import gangs_for
    from shoal.sim.replay.readers import read_trace

    pairs = [pair.partition("=") for pair in where]
    if any(not equals for _, equals, _ in pairs):
        raise Failure("--where: write COLUMN=VALUE, e.g. --where vc=6214e9", USAGE)
    kept = {column: value for column, _, value in pairs}
    return read_trace(trace, gangs_for(nodes), form=form, where=kept)


def _history(
    home: Path,
    nodes: str,
    gpus: int,
    cpus: str,
    memory: str,
    days: int,
    quiet: bool,
    brought: list[Supply],
) -> tuple[list[NodeSpec], Trace]:
    """The jobs that the cluster ran, from its log of events."""
    from shoal.cli.sim_flags import cluster_of
    from shoal.sim.replay.clusters import gangs_for

    lived = history_of(home, quiet)
    cluster = cluster_of(nodes, gpus, cpus, memory) if nodes else lived.nodes
    if not cluster and not brought:
        raise Failure("--nodes: must be at least 1, because the policy has no supply", USAGE)
    return cluster, lived.trace(gangs_for([*cluster, *brought]), days)


def _fitting(played: Trace, cluster: list[NodeSpec], policy: Policy, skip: bool) -> Trace:
    """Every job must be able to start, or the figures would describe another trace."""
    import msgspec

    from shoal.cli.screen import show
    from shoal.sim.replay.metrics import check_options
    from shoal.sim.replay.replay import too_large

    for supply in policy.supply:
        check_options(supply)
    rows = too_large(played, cluster, policy)
    if not rows:
        return played
    row, why = next(iter(rows.items()))
    if not skip:
        raise Failure(
            f"{played.name}: row {row}: {why} ({len(rows)} jobs are too large; use more nodes, "
            "or --skip-too-large)"
        )
    kept = [arrival for arrival in played.arrivals if arrival.row not in rows]
    if not kept:
        raise Failure(f"{played.name}: every job is too large for this cluster: row {row}: {why}")
    show.note(f"left out {len(played.arrivals) - len(kept)} jobs too large for this cluster")
    return msgspec.structs.replace(played, arrivals=kept)


def _need_plots(html: Path | None) -> None:
    from importlib.util import find_spec

    if html is not None and find_spec("plotly") is None:
        raise Failure("--html: needs plotly; install it with: pip install 'shoal[sim]'")


def _document(
    played: Trace, cluster: list[NodeSpec], seed: int, summaries: list[Summary]
) -> dict[str, object]:
    from shoal.sim.replay.metrics import verdict

    return {
        "trace": played.name,
        "skipped": played.skipped,
        "nodes": len(cluster),
        "gpus": sum(node.gpus for node in cluster),
        "seed": seed,
        "verdict": verdict(summaries),
        "policies": summaries,
    }


# What replays of a cluster's own history read: its log, its prices; and how they show progress.


QUIET_S = 2.0  # a shorter replay needs no progress bar
FRAME_S = 0.2
LINE_S = 10.0  # between two lines of progress if there is no terminal
BAR_WIDTH = 24


def history_of(home: Path, quiet: bool) -> History:
    """The log of the cluster in use: of this machine, or of its head."""
    from shoal.cli.cluster import context_in_use

    return _from_head(home, quiet) if context_in_use() else _from_home(home)


def prices_of(word: str, home: Path, history: bool) -> PriceList:
    """The file that was named; else, for a history, the prices that the cluster has set."""
    from shoal.cli.cluster import connect, context_in_use
    from shoal.control.home import Home
    from shoal.database.settings import FileSettings
    from shoal.forms.prices import read
    from shoal.ledger.prices import read_prices
    from shoal.model.ledger import PriceList

    if word:
        return read(word)
    if history and context_in_use():
        with connect(home) as client:
            return client.prices()
    return read_prices(FileSettings(Home(home).path)) if history else PriceList()


def _from_head(home: Path, quiet: bool) -> History:
    """In pages, as much of it as the user may see."""
    from shoal.cli.cluster import Retry
    from shoal.cli.screen.show import Spinner
    from shoal.core.state.events.log import Recorded
    from shoal.sim.replay.readers.history import read_history

    begun, read = time.monotonic(), 0
    with Retry(home) as retry, Spinner(quiet) as progress:

        def page(after: int, limit: int) -> list[Recorded]:
            nonlocal read
            while True:
                view = retry(lambda client: client.events(after=after, limit=limit))  # noqa: B023
                read += len(view.events)
                if time.monotonic() - begun > QUIET_S:
                    progress(f"reading the history: {read:,} events")
                if view.events or view.next_after <= after:
                    return view.events
                after = view.next_after  # none of those between is ours to see

        return read_history(page, "history")


def _from_home(home: Path) -> History:
    from shoal.control.home import Home

    return history_at(Home(home).database)


def history_at(path: Path) -> History:
    """The log in this file, or in the home of this name."""
    from shoal.control.home import Home
    from shoal.control.store.sqlite import SqliteStore
    from shoal.ports import StoreError
    from shoal.sim.replay.readers.history import read_history

    if path.is_dir():
        path = Home(path).database
    if not path.exists():
        raise Failure(f"--history: there is no log of a cluster at {path}; see --home", REFUSED)
    try:
        store = SqliteStore(path)
        try:
            return read_history(store.events, str(path))
        finally:
            store.close()
    except StoreError as error:
        raise Failure(str(error), REFUSED) from error


def watcher(progress: Spinner, name: str, total: int) -> Callable[[int, int], None]:
    """A bar on a terminal, else a line every LINE_S; nothing for a short replay."""
    import sys

    from shoal.cli.screen.show import bar
    from shoal.sim.replay.metrics import time_text

    begun = time.monotonic()
    every_s = FRAME_S if sys.stderr.isatty() else LINE_S
    due = [begun + max(QUIET_S, every_s)]

    def watch(done: int, now_ms: int) -> None:
        now = time.monotonic()
        if now < due[0]:
            return
        due[0] = now + every_s
        left_s = (now - begun) * (total - done) / max(done, 1)
        progress(
            f"{name} {bar(done, total, BAR_WIDTH)} {done:,} of {total:,} jobs, "
            f"{time_text(now_ms / 1000)} replayed, {time_text(left_s)} left"
        )

    return watch
