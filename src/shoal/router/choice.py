"""What a request costs at each replica, and the replica where it costs least.

After LMetric (arXiv 2603.15202): new prompt tokens there x batch size. The tokens that the replica
has still to read for earlier requests count, too, and its measured speed divides."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

# An engine computes at least the end of a prompt, however much it has cached. Without this, a
# replica that has all of it would cost nothing, whatever its batch.
NEW_MIN = 64
LOAD_TOKENS = 4_000  # reading an adapter from a disk takes as long as reading so many tokens
SWAP_TOKENS = 40_000  # and dropping one that others may want next costs more than waiting a little
SAME = 1.5  # speeds within this factor of the middle one are the same: they are measured under load
SLOWER_MAX = 8.0
FAILURE = 4.0  # each of the last failures in a row makes a replica so much dearer
FAILURES_MAX = 5


class Candidate(NamedTuple):
    id: str
    new: int  # prompt tokens that it has not cached
    pending: int = 0  # of requests there that have no token yet
    batch: int = 0  # requests there
    speed: float = 0.0  # prompt tokens per second, as measured; 0: not yet
    failures: int = 0  # in a row
    extra: int = 0  # tokens that loading an adapter is worth
    turn: int = 0  # when it was chosen last: decides between equals


def usual(speeds: Iterable[float]) -> float:
    """The speed of the middle replica; 0 if none is measured."""
    measured = [one for one in speeds if one > 0]
    return median(measured) if measured else 0.0


def cost(one: Candidate, middle: float) -> float:
    ratio = middle / one.speed if one.speed > 0 and middle > 0 else 1.0
    ratio = 1.0 if 1 / SAME <= ratio <= SAME else max(1 / SLOWER_MAX, min(SLOWER_MAX, ratio))
    work = one.pending + max(one.new, NEW_MIN) + one.extra
    return float(work * (one.batch + 1)) * ratio * FAILURE ** min(one.failures, FAILURES_MAX)


def choose(candidates: list[Candidate]) -> Candidate:
    """Of equals, the one with fewest requests, then the one that was chosen longest ago."""
    middle = usual(one.speed for one in candidates)
    return min(candidates, key=lambda one: (cost(one, middle), one.batch, one.turn))
