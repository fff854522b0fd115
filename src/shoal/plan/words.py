"""Amounts in words, as a plan shows them."""

from __future__ import annotations


def count_text(value: float) -> str:
    """Three figures: '70.6B', '2T', '1,024'."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}"


def many(count: int, noun: str) -> str:
    """'1 node', '1,024 nodes'."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
