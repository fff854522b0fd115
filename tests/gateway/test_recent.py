"""Percentiles of the last seconds, for people and curves."""

from __future__ import annotations

from shoal.gateway.gateway import ANSWERS_KEPT_MAX, KEPT_MS, Recent, rank


def test_percentiles_are_over_all_replicas_of_a_service() -> None:
    recent = Recent()
    recent.take({("chat", "r1"): range(1, 51), ("chat", "r2"): range(51, 101)}, 1_000)
    recent.take({("other", "r1"): [7]}, 1_000)
    assert recent.percentiles("chat") == {"p50_ms": 50, "p95_ms": 95, "p99_ms": 99}
    assert recent.percentiles("other") == {"p50_ms": 7, "p95_ms": 7, "p99_ms": 7}
    assert recent.percentiles("nobody") == {"p50_ms": 0, "p95_ms": 0, "p99_ms": 0}


def test_what_is_long_ago_or_too_much_is_let_go() -> None:
    recent = Recent()
    recent.take({("chat", "r1"): [900] * 10}, 0)
    recent.take({("chat", "r1"): [5]}, KEPT_MS + 1)
    assert recent.percentiles("chat")["p99_ms"] == 5
    recent.take({("chat", "r1"): [1] * (2 * ANSWERS_KEPT_MAX)}, KEPT_MS + 2)
    assert recent.percentiles("chat") == {"p50_ms": 1, "p95_ms": 1, "p99_ms": 1}
    recent.take({}, 10 * KEPT_MS)
    assert recent.percentiles("chat")["p50_ms"] == 0


def test_ranks() -> None:
    assert [rank([1, 2, 3, 4], percent) for percent in (1, 25, 26, 50, 99)] == [1, 1, 2, 2, 4]
    assert rank([], 50) == 0
