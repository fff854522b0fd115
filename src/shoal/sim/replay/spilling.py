"""What a replay over several clusters shows of each, who owes whom, and what spilling saved."""

from __future__ import annotations

import msgspec

from shoal.model.amounts import money_text, share_text
from shoal.model.durations import HOUR_MS
from shoal.model.neighbor import PRICE_UNIT
from shoal.sim.replay.metrics import HELD, Spread, Summary, summarize, time_text
from shoal.sim.replay.several import Several


class Owed(msgspec.Struct, frozen=True, kw_only=True):
    """What `cluster` owes `to`. `money`: None without prices."""

    cluster: str
    to: str
    jobs: int  # hand-overs
    gpu_hours: float
    money: float | None


class ClusterFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of the jobs that were submitted there, wherever they ran; utilization, of its own nodes.
    `balance`: what others owe it, less what it owes them; of all clusters, these add up to 0."""

    name: str
    gpus: int
    jobs: int
    wait: Spread
    completion: Spread
    utilization: float
    handed_over: int
    handed_over_gpu_hours: float
    taken_gpu_hours: float
    balance: float | None


class Clusters(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy."""

    policy: str
    clusters: list[ClusterFigures]
    owed: list[Owed]


def clusters_of(several: Several) -> Clusters:
    """Once it has run."""
    priced = several.sites_.sites[0].price is not None
    owed = [(site.spec.name, to, debt) for site in several.sites for to, debt in site.owes.items()]
    found = []
    for site in several.sites:
        own, name = summarize(site.outcome), site.spec.name
        sent = [debt for home, _, debt in owed if home == name]
        taken = [debt for _, to, debt in owed if to == name]
        balance = sum(debt.money for debt in taken) - sum(debt.money for debt in sent)
        found.append(
            ClusterFigures(
                name=name,
                gpus=sum(node.gpus for node in site.spec.nodes),
                jobs=own.jobs,
                wait=own.wait,
                completion=own.completion,
                utilization=own.utilization,
                handed_over=sum(debt.jobs for debt in sent),
                handed_over_gpu_hours=sum(debt.gpu_ms for debt in sent) / HOUR_MS,
                taken_gpu_hours=sum(debt.gpu_ms for debt in taken) / HOUR_MS,
                balance=balance / PRICE_UNIT if priced else None,
            )
        )
    debts = [
        Owed(
            cluster=home,
            to=to,
            jobs=debt.jobs,
            gpu_hours=debt.gpu_ms / HOUR_MS,
            money=debt.money / PRICE_UNIT if priced else None,
        )
        for home, to, debt in sorted(owed, key=lambda one: one[:2])
    ]
    return Clusters(policy=several.name, clusters=found, owed=debts)


class Spilled(msgspec.Struct, frozen=True, kw_only=True):
    """What spilling changed under one policy, in plain words. `cost`: of the GPU time that jobs
    held, at the price where they ran."""

    policy: str
    handed_over: int
    handed_over_gpu_hours: float
    cost_without: float | None
    cost: float | None
    text: str


def spilled(policy: str, without: Summary, within: Summary, clusters: Clusters) -> Spilled:
    jobs = sum(one.handed_over for one in clusters.clusters)
    hours = sum(one.handed_over_gpu_hours for one in clusters.clusters)
    return Spilled(
        policy=policy,
        handed_over=jobs,
        handed_over_gpu_hours=hours,
        cost_without=cost_of_jobs(without),
        cost=cost_of_jobs(within),
        text=_text(policy, without, within, jobs, hours),
    )


def cost_of_jobs(summary: Summary) -> float | None:
    costs = [one.cost for one in summary.accounts if one.group in HELD]
    known = [cost for cost in costs if cost is not None]
    return sum(known) if summary.currency and len(known) == len(costs) else None


def _text(policy: str, without: Summary, within: Summary, jobs: int, hours: float) -> str:
    """'fair with spilling: 62 hand-overs (658.0 GPU-hours). Jobs wait 12m instead of 1h 05m ...'"""
    if not jobs:
        return f"{policy} with spilling: no job had to leave its cluster, so nothing changes"
    mean_s, was_s = within.wait.mean_s, without.wait.mean_s
    change = mean_s / was_s - 1 if was_s else 0.0
    how = "less" if change < 0 else "more"
    handed = "1 hand-over" if jobs == 1 else f"{jobs:,} hand-overs"
    lost_hours, lost_before = within.sleep.lost_gpu_hours, without.sleep.lost_gpu_hours
    text = (
        f"{policy} with spilling: {handed} ({hours:,.1f} GPU-hours). Jobs wait "
        f"{time_text(mean_s)} instead of {time_text(was_s)} on average ({share_text(abs(change))} "
        f"{how}), p99 {time_text(within.wait.p99_s)} instead of {time_text(without.wait.p99_s)}. "
        f"Work lost: {lost_hours:,.1f} GPU-hours instead of {lost_before:,.1f}"
    )
    before, after = cost_of_jobs(without), cost_of_jobs(within)
    if before is None or after is None:
        return text
    costs = [money_text(cost, within.currency) for cost in (after, before)]
    return f"{text}. GPU time of jobs: {costs[0]} instead of {costs[1]}"
