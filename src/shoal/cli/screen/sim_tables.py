"""The tables of `shoal sim`: the figures of each policy, and where the GPU time went."""

from __future__ import annotations

from shoal.cli.screen.show import Cell, Column, line, note, table
from shoal.ledger.accounts import ABOUT
from shoal.model.node import NodeSpec
from shoal.sim.replay.attempts import Saved
from shoal.sim.replay.metrics import (
    FIGURES,
    AsItWas,
    Summary,
    SupplyUse,
    account_text,
    best,
    cost_text,
    time_text,
    verdict,
)
from shoal.sim.replay.traces import Trace, sums


def print_figures(
    played: Trace,
    cluster: list[NodeSpec],
    summaries: list[Summary],
    lived: AsItWas | None,
    sleeps: list[Saved],
) -> None:
    """The figures of each policy; the best are green. `sleeps`: what sleep saves."""
    asked = sums(played)
    gpus = sum(node.gpus for node in cluster)
    note(
        f"{asked['jobs']:,} jobs over {time_text(asked['span_ms'] / 1000)}, "
        f"{asked['gpu_ms'] / 3_600_000:,.0f} GPU-hours of work; "
        f"{len(cluster):,} nodes with {gpus:,} GPUs"
    )
    note(verdict(summaries))
    was = [Column("as it was", right=True)] if lived is not None else []
    columns = [Column("FIGURE"), *was]
    columns += [Column(summary.policy, right=True) for summary in summaries]
    rows: list[list[str | Cell]] = []
    for figure in FIGURES:
        if not any(figure.shown(summary) for summary in summaries):
            continue
        leaders = best(figure, summaries)
        rows.append(
            [figure.title, *([lived.shown(figure)] if lived is not None else [])]
            + [
                Cell(figure.shown(summary), "green" if index in leaders else "")
                for index, summary in enumerate(summaries)
            ]
        )
    table(columns, rows)
    _print_supplies(summaries)
    _print_accounts(summaries)
    for one in sleeps:
        note(one.text)


def _print_supplies(summaries: list[Summary]) -> None:
    """How many node-hours each supply brought under each policy, and what they cost."""
    names = dict.fromkeys(use.name for summary in summaries for use in summary.supply)
    if not names:
        return
    line("")
    columns = [Column("NODES FROM")]
    columns += [Column(summary.policy, right=True) for summary in summaries]
    rows: list[list[str | Cell]] = []
    for name in names:
        uses = [
            next((use for use in summary.supply if use.name == name), None) for summary in summaries
        ]
        rows.append([f"{name}: node-hours", *[f"{u.node_hours:,.1f}" if u else "" for u in uses]])
        rows.append([f"{name}: cost", *[f"{u.cost:,.2f}" if u else "" for u in uses]])
        rows.append([f"{name}: orders", *[_orders_text(use) if use else "" for use in uses]])
    table(columns, rows)


def _orders_text(use: SupplyUse) -> str:
    failed = [f"{use.refused} refused"] * bool(use.refused) + [f"{use.lost} lost"] * bool(use.lost)
    return f"{use.orders} ({', '.join(failed)})" if failed else str(use.orders)


def _print_accounts(summaries: list[Summary]) -> None:
    """Where the GPU time went under each policy, by the ledger."""
    titles = {one.account: one.title for summary in summaries for one in summary.accounts}
    if not titles:
        return  # no node has GPUs
    line("")
    columns = [Column("WHERE GPU TIME WENT")]
    columns += [Column(summary.policy, right=True) for summary in summaries]
    rows: list[list[str | Cell]] = []
    for account in (one for one in ABOUT if one in titles):
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
        rows.append(["cost", *[cost_text(summary) or "unknown" for summary in summaries]])
    table(columns, rows)
    if not any(summary.currency for summary in summaries):
        note("note: --prices FILE shows what this costs; see: shoal prices --help")
        return
    for text in dict.fromkeys(text for summary in summaries for text in summary.notes):
        note(f"note: {text}")
