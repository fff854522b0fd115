"""Nodes that end: what they say of it, what operators want, and what the scheduler makes of it."""

from __future__ import annotations

from shoal.model.node import End, NodeIntent
from shoal.model.report import Accepted, Refused, SetEnd
from shoal.model.supply import NodeNote, SupplyReport
from tests.core.build import Cluster, kinds

MINUTE = 60_000
HOUR = 60 * MINUTE


def ending(cluster: Cluster, name: str, in_ms: int | None, why: str = "Slurm time limit") -> None:
    """The node says when it ends, and is heard."""
    cluster.books[name].ends_in_ms = in_ms
    cluster.books[name].ends_why = why if in_ms is not None else ""
    cluster.hear(name)


def test_a_node_says_when_it_ends_and_says_it_once() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    ending(cluster, "a", HOUR)
    assert cluster.node("a").end == End(cluster.now_ms + HOUR, "Slurm time limit")
    cluster.wait(1_000)
    ending(cluster, "a", HOUR - 1_000)
    assert cluster.last.events == []
    cluster.wait(4_000)
    ending(cluster, "a", HOUR - 1_500)  # the report was on its way for a while
    assert cluster.last.events == []


def test_an_end_that_moves_is_noted_with_how() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    ending(cluster, "a", HOUR)
    ending(cluster, "a", 2 * MINUTE, "spot notice")
    (event,) = cluster.last.events
    assert getattr(event, "why", "") == "ends in 2m (spot notice)"
    ending(cluster, "a", MINUTE, "spot notice")
    (event,) = cluster.last.events
    assert getattr(event, "why", "") == "ends in 1m (spot notice), sooner than it said before"
    ending(cluster, "a", None)
    assert cluster.node("a").end is None
    assert cluster.state.endings == []


def test_the_earlier_end_counts_and_each_is_taken_back_by_whom_it_came_from() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    ending(cluster, "a", HOUR)
    at_ms = cluster.now_ms + 2 * HOUR
    assert cluster.ask(SetEnd("a", at_ms, "ann")) == Accepted("a")
    assert cluster.node("a").ends_ms == cluster.now_ms + HOUR
    ending(cluster, "a", None)
    assert cluster.node("a").end == End(at_ms, "drain planned by ann")
    cluster.intend("a", NodeIntent.OPEN)
    assert cluster.node("a").end is None
    assert cluster.ask(SetEnd("a", None)) == Accepted("a", "no drain is planned for it")
    assert isinstance(cluster.ask(SetEnd("b", at_ms)), Refused)


def test_the_end_of_a_life_is_not_the_end_of_the_next_but_a_maintenance_is() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    ending(cluster, "a", HOUR)
    cluster.ask(SetEnd("a", cluster.now_ms + 2 * HOUR))
    cluster.reboot("a")
    cluster.hear("a")
    assert cluster.node("a").own_end is None
    assert cluster.node("a").ends_ms == cluster.now_ms + 2 * HOUR


def test_a_removed_node_has_no_end() -> None:
    cluster = Cluster()
    cluster.join("a", gpus=1)
    ending(cluster, "a", HOUR)
    cluster.intend("a", NodeIntent.REMOVED)
    assert cluster.state.endings == []
    assert kinds(cluster.hear("a").events) == []


def test_an_engine_announces_the_end_of_a_node_that_it_brought() -> None:
    """Until it takes that back; the earlier of two ends counts, whoever says it."""
    cluster = Cluster()
    cluster.join("a", gpus=1)

    def look(*notes: NodeNote) -> None:
        cluster.step(supplies=(SupplyReport(engine="kubernetes", notes=notes),))

    ending(cluster, "a", HOUR)
    look(NodeNote(node="a", ends_in_ms=MINUTE, ends_why="spot notice"))
    cluster.wait(1_000)
    ending(cluster, "a", HOUR - 1_000)
    assert cluster.node("a").end == End(cluster.now_ms - 1_000 + MINUTE, "spot notice")
    cluster.step(supplies=(SupplyReport(engine="kubernetes", problem="does not answer"),))
    ending(cluster, "a", HOUR - 1_000)
    assert cluster.node("a").ends_why == "spot notice"
    look()
    ending(cluster, "a", HOUR - 1_000)
    assert cluster.node("a").ends_why == "Slurm time limit"
    look(NodeNote(node="a", labels={"zone": "b"}))
    ending(cluster, "a", None)
    assert cluster.node("a").end is None
