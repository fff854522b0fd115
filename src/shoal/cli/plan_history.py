"""`shoal plan --history`: how many nodes a goal needs, by replaying what the cluster did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.model.ledger import PriceList
    from shoal.model.node import NodeSpec
    from shoal.model.policy import Policy
    from shoal.sim.replay.metrics import Outcome
    from shoal.sim.replay.traces import Trace

HOURS_PER_MONTH = 730
LOG = ".db"


def plan_history(
    home: Path,
    path: str,
    json: bool,
    *,
    goal: str,
    days: int | str,
    policy: str,
    nodes: str,
    prices: str,
    skip_too_large: bool | str,
    **_: str,
) -> None:
    from shoal.cli.screen import plan_tables, show
    from shoal.cli.verbs.sim import prices_of, watcher
    from shoal.forms import plan as forms
    from shoal.sim.replay.replay import replay, too_large
    from shoal.sim.replay.sizing import NODES_MAX, resized, search, unreachable, usual
    from shoal.sim.replay.traces import TraceError

    if not goal:
        raise Failure('--goal is missing: what should hold, e.g. --goal "p90 wait < 1h"', USAGE)
    wanted = forms.goal(goal)
    paid = prices_of(prices, home, not path)
    try:
        cluster, played, chosen = _read(home, path, nodes, int(days), policy, json)
        wide = resized(cluster, usual(cluster), min(NODES_MAX, 16 * len(cluster)))
        played = _possible(played, too_large(played, wide, chosen), bool(skip_too_large))
        if why := unreachable(wanted, played.arrivals):
            raise Failure(f"--goal: no number of nodes meets it, because {why}", REFUSED)
        with show.Spinner(quiet=json) as progress:

            def play(on: list[NodeSpec]) -> Outcome | None:
                if too_large(played, on, chosen):
                    return None
                watch = watcher(progress, f"{len(on):,} nodes", len(played.arrivals))
                return replay(played, on, chosen, progress=watch)

            answer = search(cluster, wanted, play)
    except TraceError as error:
        raise Failure(str(error), REFUSED) from error
    month = _per_month(paid, answer.kind)
    if json:
        show.as_json(
            {
                "goal": goal,
                "met_now": answer.now.met,
                "nodes_now": answer.now.nodes,
                "nodes_needed": answer.best.nodes if answer.best else None,
                "jobs": len(played.arrivals),
                "currency": paid.currency,
                "node_per_month": month,
                "tried": answer.tried,
            }
        )
        return
    plan_tables.print_sizing(answer, wanted, paid.currency, month)
    if answer.best is None:
        show.note(
            "note: more nodes do not help: jobs wait for others (after), for their begin, or for "
            "limits of their tenant; see shoal why JOB"
        )
    if month is None:
        show.note("note: --prices FILE shows what this costs; see: shoal prices --help")


def _read(
    home: Path, path: str, nodes: str, days: int, policy: str, quiet: bool
) -> tuple[list[NodeSpec], Trace, Policy]:
    """The nodes, the jobs and the policy: of this cluster's log, of another home, or of a trace."""
    from shoal.cli.sim_flags import cluster_of
    from shoal.cli.verbs.sim import history_at, history_of
    from shoal.core.policies import SHIPPED
    from shoal.forms.plan import existing
    from shoal.forms.policy import find
    from shoal.sim.replay.clusters import gangs_for
    from shoal.sim.replay.readers import read_trace

    where = existing(path, "--history") if path else None
    if where is not None and not where.is_dir() and where.suffix != LOG:
        if days:
            raise Failure("--days: is for a cluster's own history, not for a trace", USAGE)
        if not nodes:
            raise Failure("--nodes is missing: how many nodes with 8 GPUs ran this trace", USAGE)
        cluster = cluster_of(nodes, 8, "", "")
        played = read_trace(where, gangs_for(cluster))
        return cluster, played, find(policy or "fair", flag="--policy")
    lived = history_of(home, quiet) if where is None else history_at(where)
    cluster = cluster_of(nodes, 8, "", "") if nodes else lived.nodes
    chosen = find(policy, flag="--policy") if policy else lived.policy or SHIPPED["fair"]
    return cluster, lived.trace(gangs_for(cluster), days), chosen


def _possible(played: Trace, rows: dict[int, str], skip: bool) -> Trace:
    """Without the jobs that no number of nodes can run."""
    import msgspec

    if not rows:
        return played
    row, why = next(iter(rows.items()))
    if not skip:
        raise Failure(
            f"--goal: {len(rows)} jobs fit on no number of these nodes: row {row}: {why}; "
            "--skip-too-large leaves them out",
            REFUSED,
        )
    kept = [arrival for arrival in played.arrivals if arrival.row not in rows]
    if not kept:
        raise Failure(f"{played.name}: every job is too large: row {row}: {why}", REFUSED)
    return msgspec.structs.replace(played, arrivals=kept)


def _per_month(prices: PriceList, kind: NodeSpec) -> float | None:
    """What one more node costs; None if the price list does not say it."""
    from shoal.ledger.book_state import Hardware
    from shoal.ledger.prices import rate_of

    rate = rate_of(prices, kind.id, Hardware(kind.gpu_model, kind.gpus))
    return (
        None
        if rate.per_hour is None
        else float(rate.per_hour) * max(1, kind.gpus) * HOURS_PER_MONTH
    )
