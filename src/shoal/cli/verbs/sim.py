"""`shoal sim`: replay a trace, or this cluster's own history, under other policies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.grammar import DEFAULT_HOME, HomeOption, JsonOption
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.cli.screen.show import Progress
    from shoal.model.node import NodeSpec
    from shoal.model.policy import Policy
    from shoal.model.prices import PriceList
    from shoal.sim.replay.clusters import Conditions
    from shoal.sim.replay.metrics import AsItWas, Outcome, Summary
    from shoal.sim.replay.traces import Trace

QUIET_S = 2.0  # what is over sooner needs no progress bar
FRAME_S = 0.2
LINE_S = 10.0  # between two lines of progress where there is no terminal
BAR_WIDTH = 24
DEFAULT_GPUS = 8


def sim(
    trace: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="A file of jobs, .gz or not.")
    ] = None,
    nodes: Annotated[
        str, typer.Option("--nodes", "-n", metavar="N|CSV", help="How many nodes, or a list.")
    ] = "",
    gpus: Annotated[
        int, typer.Option("--gpus", "-g", min=0, max=256, metavar="N", help="Of each node.")
    ] = DEFAULT_GPUS,
    cpus: Annotated[
        str, typer.Option("--cpus", metavar="N", help="Of each node; else CPUs never run out.")
    ] = "",
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Of each node; with --cpus.")
    ] = "",
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", metavar="NAME", help="May be given several times."),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Replay what this cluster ran, on its own nodes.")
    ] = False,
    days: Annotated[
        int, typer.Option("--days", min=0, metavar="N", help="Of the history, the last N alone.")
    ] = 0,
    form: Annotated[
        str, typer.Option("--format", metavar="NAME", help="Of the trace; else by its columns.")
    ] = "",
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="COLUMN=VALUE", help="Only these rows of the trace."),
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, metavar="N", help="So many jobs; 0: all, once.")
    ] = 0,
    load: Annotated[
        str, typer.Option("--load", metavar="X", help="Arrivals X times as close together.")
    ] = "1",
    scale: Annotated[
        str, typer.Option("--scale", metavar="X", help="X times as many jobs in the same time.")
    ] = "1",
    start_up: Annotated[
        str, typer.Option("--start-up", metavar="TIME", help="From the placement to work.")
    ] = "10s",
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="TIME", help="Between two; or never.")
    ] = "10m",
    restart_cost: Annotated[
        str, typer.Option("--restart-cost", metavar="TIME", help="To load a checkpoint.")
    ] = "30s",
    failures: Annotated[
        str,
        typer.Option(
            "--failures", metavar="RATE|CSV", help="In 1000 node-days, or a table of causes."
        ),
    ] = "0",
    repair: Annotated[
        str, typer.Option("--repair", metavar="TIME", help="Of a node that failed.")
    ] = "4h",
    slow: Annotated[
        str, typer.Option("--slow", metavar="SHARE:SPEED", help="Slow nodes, e.g. 0.05:0.7.")
    ] = "",
    stragglers: Annotated[
        str, typer.Option("--stragglers", metavar="SHARE:SPEED", help="Slow attempts of jobs.")
    ] = "",
    skip_too_large: Annotated[
        bool, typer.Option("--skip-too-large", help="Leave out jobs that fit on no such cluster.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of all chance.")] = 0,
    check: Annotated[
        int, typer.Option("--check", min=0, metavar="N", help="Check invariants every N steps.")
    ] = 0,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots, too.")
    ] = None,
    prices: Annotated[
        str, typer.Option("--prices", metavar="FILE", help="Price list. [the cluster's]")
    ] = "",
    json: JsonOption = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Replay a trace or your own history under other policies.

    The scheduler is the real one, the whole of it; the world is simulated: start-up times,
    checkpoints, failures, slow nodes. The same command gives the same figures again. A plain
    trace is a CSV with the columns submit_s, duration_s and gpus; sacct output and public traces
    are known by their columns. What each figure means stands in docs/simulate.md.

    Examples:
      shoal sim jobs.csv --nodes 8 --gpus 8
      shoal sim jobs.csv --nodes 8 --policy fifo --policy fair --html report.html
      shoal sim jobs.csv --nodes 8 --load 1.5 --failures 4
      shoal sim --history --days 30 --policy fair
      shoal sim jobs.csv.gz --nodes 64 --where vc=6214e9 --json | jq .policies[0].wait
    """
    from shoal.cli.screen import show
    from shoal.cli.sim_flags import conditions_of, factor
    from shoal.sim.replay.metrics import as_it_was, summarize
    from shoal.sim.replay.traces import TraceError

    chosen = [(name, policy_named(name)) for name in dict.fromkeys(policy or ["fair"])]
    conditions = conditions_of(
        start_up, checkpoint, restart_cost, failures, repair, slow, stragglers
    )
    factors = factor(load, "--load"), factor(scale, "--scale")
    paid = _prices(prices, home, history)
    if html is not None:
        _need_plots()
    try:
        if history:
            if trace is not None:
                raise Failure("--history: takes no TRACE; leave one of them out", USAGE)
            cluster, played = _history(home, nodes, gpus, cpus, memory, days)
        else:
            if days:
                raise Failure("--days: is of the history; use it with --history", USAGE)
            cluster, played = _trace(trace, nodes, gpus, cpus, memory, form, where or [])
        lived = as_it_was(played.arrivals) if not jobs and factors == (1, 1) else None
        played = _stretched(played, jobs, *factors, seed)
        played = _fitting(played, cluster, skip_too_large)
        outcomes = []
        for name, one in chosen:
            with show.Progress(quiet=json) as progress:
                watch = _watcher(progress, name, len(played.arrivals))
                outcomes.append(
                    _replay(played, cluster, one, conditions, name, seed, check, watch, paid)
                )
    except TraceError as error:
        raise Failure(str(error), REFUSED) from error
    summaries = [summarize(outcome) for outcome in outcomes]
    if html is not None:
        _write_page(html, played, cluster, outcomes, summaries)
    if json:
        was = {"as_it_was": lived} if lived is not None else {}
        show.as_json({**_document(played, cluster, seed, summaries), **was})
        return
    _print(played, cluster, summaries, lived)
    if html is not None:
        show.note(f"wrote {html}")


def policy_named(name: str) -> Policy:
    """A shipped one, or one from a file."""
    from shoal.forms.policy import find

    return find(name, flag="--policy")


def _prices(word: str, home: Path, history: bool) -> PriceList:
    """The file that was named; else, for a history, the prices that the cluster has set."""
    from shoal.control.home import Home
    from shoal.forms.prices import read
    from shoal.ledger.prices import read_prices
    from shoal.model.prices import PriceList

    if word:
        return read(word)
    return read_prices(Home(home).prices) if history else PriceList()


def _replay(
    played: Trace,
    cluster: list[NodeSpec],
    policy: Policy,
    conditions: Conditions,
    name: str,
    seed: int,
    check: int,
    watch: Callable[[int, int], None],
    prices: PriceList,
) -> Outcome:
    from shoal.sim.replay.replay import replay

    return replay(
        played,
        cluster,
        policy,
        conditions,
        name=name,
        seed=seed,
        check_every=check,
        progress=watch,
        prices=prices,
    )


def _trace(
    trace: Path | None,
    nodes: str,
    gpus: int,
    cpus: str,
    memory: str,
    form: str,
    where: list[str],
) -> tuple[list[NodeSpec], Trace]:
    from shoal.cli.sim_flags import cluster_of
    from shoal.sim.replay.clusters import gangs_for
    from shoal.sim.replay.readers import read_trace

    if trace is None:
        raise Failure("TRACE is missing: name a file of jobs, or use --history", USAGE)
    if not nodes:
        raise Failure("--nodes is missing: how many, or a CSV with a row for each", USAGE)
    cluster = cluster_of(nodes, gpus, cpus, memory)
    pairs = [pair.partition("=") for pair in where]
    if any(not equals for _, equals, _ in pairs):
        raise Failure("--where: write COLUMN=VALUE, e.g. --where vc=6214e9", USAGE)
    kept = {column: value for column, _, value in pairs}
    return cluster, read_trace(trace, gangs_for(cluster), form=form, where=kept)


def _history(
    home: Path, nodes: str, gpus: int, cpus: str, memory: str, days: int
) -> tuple[list[NodeSpec], Trace]:
    """What the cluster at this home ran, from its log of events."""
    from shoal.cli.sim_flags import cluster_of
    from shoal.control.home import Home
    from shoal.control.store.sqlite import SqliteStore
    from shoal.ports import StoreError
    from shoal.sim.replay.clusters import gangs_for
    from shoal.sim.replay.readers.history import read_history

    path = Home(home).database
    if not path.exists():
        raise Failure(f"--history: there is no cluster's log at {path}; see --home", REFUSED)
    try:
        store = SqliteStore(path)
        try:
            lived = read_history(store.events, str(path))
        finally:
            store.close()
    except StoreError as error:
        raise Failure(str(error), REFUSED) from error
    cluster = cluster_of(nodes, gpus, cpus, memory) if nodes else lived.nodes
    return cluster, lived.trace(gangs_for(cluster), days)


def _stretched(played: Trace, jobs: int, load: float, scale: float, seed: int) -> Trace:
    from shoal.sim.replay.traces import stretch

    return stretch(played, jobs=jobs, load=load, scale=scale, seed=seed)


def _fitting(played: Trace, cluster: list[NodeSpec], skip: bool) -> Trace:
    """All jobs must be able to start, or the figures would be of another trace."""
    import msgspec

    from shoal.cli.screen import show
    from shoal.sim.replay.replay import too_large

    rows = too_large(played, cluster)
    if not rows:
        return played
    row, why = next(iter(rows.items()))
    if not skip:
        raise Failure(
            f"{played.name}: row {row}: {why} ({len(rows)} such jobs; use more --nodes, or "
            "--skip-too-large)"
        )
    kept = [arrival for arrival in played.arrivals if arrival.row not in rows]
    if not kept:
        raise Failure(f"{played.name}: every job is too large for this cluster: row {row}: {why}")
    show.note(f"left out {len(played.arrivals) - len(kept)} jobs too large for this cluster")
    return msgspec.structs.replace(played, arrivals=kept)


def _watcher(progress: Progress, name: str, total: int) -> Callable[[int, int], None]:
    """A bar on a terminal, a line now and then otherwise; nothing for what is over at once."""
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


def _need_plots() -> None:
    from importlib.util import find_spec

    if find_spec("plotly") is None:
        raise Failure("--html: needs plotly; install it with: pip install 'shoal[sim]'")


def _write_page(
    path: Path,
    played: Trace,
    cluster: list[NodeSpec],
    outcomes: list[Outcome],
    summaries: list[Summary],
) -> None:
    from shoal.sim.replay.report import page

    path.write_text(page(played, cluster, outcomes, summaries), encoding="utf-8")


def _document(
    played: Trace, cluster: list[NodeSpec], seed: int, summaries: list[Summary]
) -> dict[str, object]:
    return {
        "trace": played.name,
        "skipped": played.skipped,
        "nodes": len(cluster),
        "gpus": sum(node.gpus for node in cluster),
        "seed": seed,
        "policies": summaries,
    }


def _print(
    played: Trace, cluster: list[NodeSpec], summaries: list[Summary], lived: AsItWas | None
) -> None:
    from shoal.cli.screen.show import Cell, Column, note, table
    from shoal.sim.replay.metrics import FIGURES, best, time_text
    from shoal.sim.replay.traces import sums

    asked = sums(played)
    gpus = sum(node.gpus for node in cluster)
    note(
        f"{asked['jobs']:,} jobs over {time_text(asked['span_ms'] / 1000)}, "
        f"{asked['gpu_ms'] / 3_600_000:,.0f} GPU-hours of work; "
        f"{len(cluster):,} nodes with {gpus:,} GPUs"
    )
    was = [Column("as it was", right=True)] if lived is not None else []
    columns = [Column("FIGURE"), *was]
    columns += [Column(summary.policy, right=True) for summary in summaries]
    rows: list[list[str | Cell]] = []
    for figure in FIGURES:
        leaders = best(figure, summaries)
        rows.append(
            [figure.title, *([lived.shown(figure)] if lived is not None else [])]
            + [
                Cell(figure.shown(summary), "green" if index in leaders else "")
                for index, summary in enumerate(summaries)
            ]
        )
    table(columns, rows)
    _print_accounts(summaries)


def _print_accounts(summaries: list[Summary]) -> None:
    """Where the GPU time went under each policy, by the ledger."""
    from shoal.cli.screen.show import Cell, Column, line, note, table
    from shoal.ledger.accounts import Account
    from shoal.sim.replay.metrics import account_text, cost_text

    titles = {one.account: one.title for summary in summaries for one in summary.accounts}
    if not titles:
        return  # no node has GPUs
    line("")
    columns = [Column("WHERE GPU TIME WENT")]
    columns += [Column(summary.policy, right=True) for summary in summaries]
    rows: list[list[str | Cell]] = []
    for account in (one for one in Account if one in titles):
        found = [
            next((one for one in summary.accounts if one.account == account), None)
            for summary in summaries
        ]
        cells = [
            account_text(one, summary.currency)
            for one, summary in zip(found, summaries, strict=True)
        ]
        rows.append([titles[account], *cells])
    rows.append(["all", *[f"{summary.gpu_hours:,.1f} h" for summary in summaries]])
    if any(summary.currency for summary in summaries):
        rows.append(["cost", *[cost_text(summary) or "not known" for summary in summaries]])
    table(columns, rows)
    if not any(summary.currency for summary in summaries):
        note("note: --prices FILE shows what this costs; see: shoal prices --help")
        return
    for text in dict.fromkeys(text for summary in summaries for text in summary.notes):
        note(f"note: {text}")
