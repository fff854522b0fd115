"""How often to save: as often as the time lost to failures outweighs the time lost to saving."""

from __future__ import annotations

import math

# What is believed before anything was seen: one failure a month on each node.
NODE_MTBF_S = 30 * 24 * 3600.0
FIRST_SAVE_STEPS = 5  # the first save comes early, for its cost is not known yet
GROWTH_MAX = 10  # and one odd measurement may not put off the next for long


def mtbf_s(nodes: int, trained_s: float, restarts: int, told_s: float | None) -> float:
    """The mean time between failures: as Shoal tells it, else the belief corrected by this run."""
    if told_s is not None:
        return told_s
    return (NODE_MTBF_S / max(1, nodes) + trained_s) / (1 + restarts)


def interval_s(blocked_s: float, written_s: float, between_failures_s: float) -> float:
    """Young's interval, sqrt(2 x cost x time between failures), with Daly's correction.

    The cost is the time that the loop is blocked; the writing goes on beside it, but a save must
    be done before the next one begins.
    """
    cost = max(blocked_s, 1e-6)
    if cost >= 2 * between_failures_s:
        return max(between_failures_s, written_s)
    ratio = cost / (2 * between_failures_s)
    daly = math.sqrt(2 * cost * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
    return max(daly, written_s, cost)


def interval_steps(seconds: float, step_s: float, before: int) -> int:
    """In steps, as all members must agree on one; at most ten times the interval before."""
    return max(1, min(round(seconds / max(step_s, 1e-6)), before * GROWTH_MAX))
