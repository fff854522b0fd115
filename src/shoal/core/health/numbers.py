"""Middle values of whole numbers, with the side named on which an even count falls."""

from __future__ import annotations

from collections.abc import Iterable


def lower_median(values: Iterable[int]) -> int:
    """Of four the second smallest: when half of a gang is slow, the fast half is the measure."""
    ranked = sorted(values)
    return ranked[(len(ranked) - 1) // 2]


def upper_median(values: Iterable[int]) -> int:
    ranked = sorted(values)
    return ranked[len(ranked) // 2]


def keep(ring: list[int], value: int, size: int) -> None:
    """The newest `size` values."""
    ring.append(value)
    if len(ring) > size:
        del ring[0]
