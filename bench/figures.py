"""What all benchmarks share: percentiles, tables, and a description of the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """The distribution of a measured time. Trust the median; the rest shows the machine's noise."""

    median_ms: float
    p99_ms: float
    max_ms: float
    count: int


def spread(times_ns: Sequence[int]) -> Spread:
    return Spread(
        median_ms=round(percentile(times_ns, 50) / 1e6, 4),
        p99_ms=round(percentile(times_ns, 99) / 1e6, 4),
        max_ms=round(max(times_ns) / 1e6, 4),
        count=len(times_ns),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed."""
    ranked = sorted(values)
    rank = max(1, -(-len(ranked) * percent // 100))
    return ranked[int(rank) - 1]


def ratio(value: float, base: float) -> float:
    return round(value / base, 2) if base else 0.0


def machine() -> str:
    """One line to print beside figures, because they mean little without it."""
    load = ", ".join(f"{average:.2f}" for average in os.getloadavg())
    return (
        f"{os.cpu_count()} CPUs ({platform.machine()}), {platform.system()}, "
        f"Python {platform.python_version()}, load average {load}"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with columns as wide as needed; the first is text, the others are figures."""
    lines = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
