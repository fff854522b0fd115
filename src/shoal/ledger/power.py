"""Measured power: if drivers report it, a node's energy model is fitted to it."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from shoal.ledger.accounts import ABOUT, HOUR_MS, Account
from shoal.ledger.postings import Postings
from shoal.ledger.prices import Rate
from shoal.model.resources import WHOLE_GPU_MILLI
from shoal.model.series import NodeSample

# Samples come every few seconds; the time between two that are further apart is not measured.
APART_MS_MAX = 15_000


class Drawn(NamedTuple):
    """The power that a machine drew in a range, for how much of its GPU time, and of how much."""

    watt_ms: int
    covered_us: int
    accounts: dict[Account, int]


def hear_power(postings: Postings, node_id: str, sample: NodeSample) -> None:
    """Counts only if every GPU of the node reports: a part says nothing about the whole."""
    node = postings.cluster.nodes.get(node_id)
    watts = [gpu.power_w for gpu in sample.gpus if gpu.power_w is not None]
    if node is None or not node.gpus or len(watts) != node.gpus:
        return
    now_ms, since_ms = postings.cluster.now_ms, node.power_ms
    node.power_ms = now_ms
    if since_ms >= 0 and 0 < now_ms - since_ms <= APART_MS_MAX:
        key = (since_ms // HOUR_MS, node_id)
        drawn, covered = postings.adds.power.get(key, (0, 0))
        passed_ms = now_ms - since_ms
        postings.adds.power[key] = (
            drawn + sum(watts) * passed_ms,
            covered + node.gpus * WHOLE_GPU_MILLI * passed_ms,
        )


def fitted(rate: Rate, drawn: Drawn) -> Rate:
    """The rate with watts fitted so that the model's energy equals the measured one; for unmeasured
    time the model stays as it is. Without a model all accounts draw the same."""
    total_us = sum(drawn.accounts.values())
    if not drawn.covered_us or not total_us:
        return rate
    measured = Fraction(drawn.watt_ms * 1000, drawn.covered_us)  # watts per GPU
    if rate.watts is None:
        whole = drawn.covered_us * 10 >= total_us * 9
        return rate._replace(watts=(measured, measured)) if whole else rate
    idle, busy = rate.watts
    model = sum(
        (_watts(idle, busy, account) * amount for account, amount in drawn.accounts.items()),
        Fraction(0),
    )
    if not model:
        return rate
    part = min(Fraction(1), Fraction(drawn.covered_us, total_us))
    factor = part * measured * total_us / model + (1 - part)
    return rate._replace(watts=(idle * factor, busy * factor))


def _watts(idle: Fraction, busy: Fraction, account: Account) -> Fraction:
    load = ABOUT[account].load
    return Fraction(0) if load is None else idle + (busy - idle) * load / 1000


def by_machine(
    powers: Iterable[tuple[int, int, int]], amounts: Iterable[tuple[int, Account, int]]
) -> dict[int, Drawn]:
    drawn = {machine: Drawn(watt_ms, covered, {}) for machine, watt_ms, covered in powers}
    for machine, account, gpu_us in amounts:
        if machine in drawn:
            drawn[machine].accounts[account] = gpu_us
    return drawn
