"""Computes how often to save, so that failures and saves together cost the least time."""

from __future__ import annotations

import math

# The assumption before any failure is seen: one failure a month on each node.
NODE_MTBF_S = 30 * 24 * 3600.0
FIRST_SAVE_STEPS = 5  # the first save comes early, because its cost is not known yet
GROWTH_MAX = 10  # so that one odd measurement does not delay the next save for long


def mtbf_s(nodes: int, trained_s: float, restarts: int, told_s: float | None) -> float:
    """The mean time between failures: from Shoal, else the assumption corrected by this run."""
    if told_s is not None:
        return told_s
    return (NODE_MTBF_S / max(1, nodes) + trained_s) / (1 + restarts)


def interval_s(blocked_s: float, written_s: float, between_failures_s: float) -> float:
    """Young's interval, sqrt(2 x cost x time between failures), with Daly's correction.

    The cost is the time that the loop is blocked. Writing goes on beside the training, but a save
    must be done before the next one starts.
    """
    cost = max(blocked_s, 1e-6)
    if cost >= 2 * between_failures_s:
        return max(between_failures_s, written_s)
    ratio = cost / (2 * between_failures_s)
    daly = math.sqrt(2 * cost * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
    return max(daly, written_s, cost)


def interval_steps(seconds: float, step_s: float, before: int) -> int:
    """The interval in steps, which all members can agree on; at most ten times the previous."""
    return max(1, min(round(seconds / max(step_s, 1e-6)), before * GROWTH_MAX))
