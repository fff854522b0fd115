"""Medians of whole numbers that name the side chosen for an even count."""

from __future__ import annotations

from collections.abc import Iterable


def lower_median(values: Iterable[int]) -> int:
    """The second smallest of four: if half of a gang is slow, the fast half is the norm."""
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
