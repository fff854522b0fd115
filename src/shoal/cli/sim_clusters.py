"""`shoal sim --clusters`: each policy over several clusters, without and with spilling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.cli.screen.show import Cell, Column, line, table
from shoal.forms.failure import USAGE, Failure
from shoal.model.amounts import money_text
from shoal.model.policy import Policy
from shoal.sim.replay.clusters import Conditions
from shoal.sim.replay.metrics import (
    Outcome,
    Summary,
    gpu_hours_text,
    percent_text,
    summarize,
    time_text,
)
from shoal.sim.replay.replay import Progress
from shoal.sim.replay.several import Several, Sites
from shoal.sim.replay.spilling import ClusterFigures, Clusters, Spilled, clusters_of, spilled
from shoal.sim.replay.traces import Trace

SPILL = " + spill"


class Played(NamedTuple):
    """In the order of the policies, without and with spilling."""

    summaries: list[Summary]
    clusters: list[Clusters]
    spilling: list[Spilled]


# Flags that say what the file says, or what is not for several clusters.
APART = ("nodes", "gpus", "cpus", "memory", "history", "days", "sleep", "html", "prices")


def refuse(given: Sequence[object]) -> None:
    """`given`: those above, in this order."""
    for flag, value in zip(APART, given, strict=True):
        if value:
            raise Failure(f"--{flag}: does not go with --clusters; leave one of them out", USAGE)


def play(
    sites: Sites,
    traces: Sequence[Trace],
    chosen: Sequence[tuple[str, Policy]],
    conditions: Conditions,
    seed: int,
    check_every: int,
    watch: Callable[[str], Progress],
) -> Played:
    summaries, clusters, spilling = [], [], []
    for name, policy in chosen:
        for word, played in (("", sites.alone()), (SPILL, sites)):
            several = Several(played, traces, policy, conditions, name=f"{name}{word}", seed=seed)
            outcome: Outcome = several.run(check_every, watch(several.name))
            summaries.append(summarize(outcome))
            clusters.append(clusters_of(several))
        without, within = summaries[-2:]
        spilling.append(spilled(name, without, within, clusters[-1]))
    return Played(summaries, clusters, spilling)


def print_clusters(played: Played) -> None:
    """The figures of each cluster under each policy, and who owes whom."""
    line("")
    currency = played.summaries[0].currency
    columns = [Column("CLUSTER")]
    columns += [Column(one.policy, right=True) for one in played.clusters]
    rows: list[list[str | Cell]] = []
    for number, first in enumerate(played.clusters[0].clusters):
        ones = [of.clusters[number] for of in played.clusters]
        for title, text in _FIGURES:
            rows.append([f"{first.name}: {title}", *[text(one) for one in ones]])
        if first.balance is not None:
            texts = [money_text(one.balance or 0.0, currency) for one in ones]
            rows.append([f"{first.name}: balance", *texts])
    for pair in sorted({(one.cluster, one.to) for of in played.clusters for one in of.owed}):
        cells = []
        for of in played.clusters:
            owed = next((one for one in of.owed if (one.cluster, one.to) == pair), None)
            said = gpu_hours_text(owed.gpu_hours) if owed is not None else ""
            if owed is not None and owed.money is not None:
                said += f", {money_text(owed.money, currency)}"
            cells.append(said)
        rows.append([f"{pair[0]} owes {pair[1]}", *cells])
    table(columns, rows)


_FIGURES: tuple[tuple[str, Callable[[ClusterFigures], str]], ...] = (
    ("jobs", lambda one: f"{one.jobs:,}"),
    ("wait, mean", lambda one: time_text(one.wait.mean_s)),
    ("wait, p99", lambda one: time_text(one.wait.p99_s)),
    ("completion, mean", lambda one: time_text(one.completion.mean_s)),
    ("utilization", lambda one: percent_text(one.utilization)),
    ("handed over", lambda one: gpu_hours_text(one.handed_over_gpu_hours)),
)
