"""Ranks: who comes first. Each maps what is known of a job to a key; the smallest goes first.

Every rank begins with the job's priority and ends with its number, so that the order is total and
the same on every machine. A key depends on the facts alone, and waiting alone changes none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

Key = tuple[int, ...]

# Jobs with unknown run times come after all others.
UNKNOWN_MS = 1 << 62
# Attained GPU-time at which Tiresias demotes a job: 3,250 and 7,200 GPU-seconds, as published.
TIRESIAS_GPU_MS = (3_250_000, 7_200_000)


class Facts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is known about a waiting or running job when it is ranked."""

    number: int  # order of submission
    gpus: int  # of the whole gang; a gang without GPUs counts as one
    priority: int = 0
    submitted_ms: int = 0
    attained_ms: int = 0  # how long it has run, over all attempts
    attained_gpu_ms: int = 0
    remaining_ms: int | None = None  # given or learned; None if unknown
    place: int = 0  # inside a level of attained service; see `tiresias`


Rank = Callable[[Facts], Key]


def fifo(facts: Facts) -> Key:
    """First come, first served."""
    return (-facts.priority, facts.submitted_ms, facts.number)


def srtf(facts: Facts) -> Key:
    """Shortest remaining time first."""
    return (-facts.priority, _remaining(facts), facts.number)


def srsf(facts: Facts) -> Key:
    """Shortest remaining service first: time multiplied by the GPUs that it would hold."""
    return (-facts.priority, _remaining(facts) * facts.gpus, facts.number)


def tiresias(facts: Facts) -> Key:
    """Least attained service in a few levels; inside a level, the queue assigns places.

    As published, running jobs keep their places and jobs that are not chosen go behind them.
    """
    return (-facts.priority, level(facts.attained_gpu_ms), facts.place, facts.number)


def level(attained_gpu_ms: int, thresholds: Sequence[int] = TIRESIAS_GPU_MS) -> int:
    """The number of thresholds that the attained service has reached."""
    return sum(attained_gpu_ms >= threshold for threshold in thresholds)


def _remaining(facts: Facts) -> int:
    return UNKNOWN_MS if facts.remaining_ms is None else facts.remaining_ms
