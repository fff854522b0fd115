"""Scores, histories and standings put together: the slow node goes, the heavy rank does not."""

from __future__ import annotations

import harness.gangs as gangs
from harness.gangs import Gang

from shoal.core.books.quarantine import checked, suspected
from shoal.model.health import HealthRule, Record, Standing, Suspicion

RULE = HealthRule()
NODES = ("a", "b", "c", "d")
STEPS = 400


def attempts(slow_node: str, heavy_rank: int) -> tuple[dict[str, Record], list[set[int]]]:
    """Three attempts of one job with its ranks elsewhere each time; every check passes."""
    records = {node: Record() for node in NODES}
    runs: list[set[int]] = []
    for attempt in range(1, 4):
        nodes = NODES[attempt:] + NODES[:attempt]

        def drag(member: int, now_s: float, step: int, nodes: tuple[str, ...] = nodes) -> float:
            return (1.5 if nodes[member] == slow_node else 1.0) * (
                1.4 if member == heavy_rank else 1.0
            )

        slow: set[int] = set()
        for _, now_ms, change in gangs.watch(Gang(), drag, STEPS, attempt, RULE).changes:
            assert change.slow
            slow.add(change.member)
            at_ms = attempt * 1_000_000 + now_ms
            news = Suspicion(
                at_ms=at_ms, why="slow", job="j1", attempt=attempt, member=change.member
            )
            node = nodes[change.member]
            record = suspected(records[node], news, RULE, room=True)
            if record.standing is Standing.SUSPECT:
                record = checked(record, True, "in line", at_ms, RULE, room=True)
            records[node] = record
        runs.append(slow)
    return records, runs


def test_a_slow_node_is_quarantined_by_the_second_rank_that_is_slow_there() -> None:
    records, _ = attempts(slow_node="b", heavy_rank=-1)
    assert records["b"].standing is Standing.QUARANTINED
    assert all(records[node].standing is Standing.OK for node in "acd")


def test_a_rank_with_more_to_do_makes_suspects_and_no_prisoners() -> None:
    records, runs = attempts(slow_node="", heavy_rank=3)
    assert all(record.standing is Standing.OK for record in records.values())
    assert runs == [{3}] * 3


def test_both_at_once_are_told_apart() -> None:
    records, _ = attempts(slow_node="b", heavy_rank=3)
    assert records["b"].standing is Standing.QUARANTINED
    assert [node for node in NODES if records[node].standing is not Standing.OK] == ["b"]
