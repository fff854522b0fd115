"""A node at rest says "as before": that keeps it in contact, and never stands in for news."""

from __future__ import annotations

import msgspec

from shoal.core.nodebook import STILLS_MAX
from shoal.core.phases.observe import FENCE_MS
from shoal.model.node import JOINED, NodeHealth
from shoal.model.report import NodeReport, Still
from tests.core.build import Cluster
from tests.core.test_nodebook import book, envelope, launch


def test_a_node_at_rest_reports_in_full_only_now_and_then() -> None:
    node = book()
    assert isinstance(node.heartbeat(), NodeReport)
    said = [node.heartbeat() for _ in range(STILLS_MAX + 1)]
    assert said[:-1] == [Still("a", 3, 1)] * STILLS_MAX
    assert isinstance(said[-1], NodeReport) and said[-1].sequence == 2


def test_whatever_changes_is_reported_in_full() -> None:
    node = book()
    node.report()
    node.take(envelope(1, launch()))
    assert isinstance(node.heartbeat(), NodeReport)
    assert isinstance(node.heartbeat(), Still)  # it runs on, and says nothing else
    node.leaving = True
    assert isinstance(node.heartbeat(), NodeReport)
    node.ends_in_ms = 60_000
    assert isinstance(node.heartbeat(), NodeReport)
    node.ends_in_ms = 59_000  # the same end, a second later
    assert isinstance(node.heartbeat(), Still)


def test_a_node_that_says_as_before_is_not_silent_though_no_step_was_made_for_it() -> None:
    cluster = Cluster()
    cluster.join("a")
    still = Still("a", 1, 1)
    for _ in range(4):
        cluster.wait(cluster.policy.silent_after_ms - 1)
        assert cluster.controller.still(still)
        assert cluster.step().events == []
    cluster.wait(cluster.policy.silent_after_ms)
    cluster.step()
    assert cluster.node("a").health is NodeHealth.SILENT


def test_as_before_counts_only_for_the_report_that_the_controller_has() -> None:
    cluster = Cluster()
    cluster.join("a")
    for still in (Still("a", 1, 2), Still("a", 2, 1), Still("b", 1, 1)):
        assert not cluster.controller.still(still)
    cluster.wait(cluster.policy.silent_after_ms)
    cluster.step()
    assert cluster.node("a").health is NodeHealth.SILENT
    assert not cluster.controller.still(Still("a", 1, 1))  # what it missed meanwhile is not known
    cluster.hear("a")
    assert cluster.controller.still(Still("a", 1, 2))
    cluster.learn_gone("a")
    assert cluster.node("a").dead
    assert not cluster.controller.still(Still("a", 1, 2))


def test_one_that_waited_for_a_step_does_not_bring_a_dead_node_back() -> None:
    cluster = Cluster()
    cluster.join("a")
    assert cluster.controller.still(Still("a", 1, 1))
    cluster.learn_gone("a")
    assert cluster.node("a").dead and "a" not in cluster.state.heard.contacts


def test_a_machine_that_joined_is_given_up_without_waiting_for_somebody_to_end_it() -> None:
    for origin, lost in ((JOINED, True), ("", False)):
        cluster = Cluster()
        cluster.join("a", origin=origin)
        cluster.join("b")
        for _ in range(2):
            cluster.wait(cluster.policy.grace_ms // 2)
            cluster.step(nodes=(cluster.books["b"].report(),), fences=True)
        assert (cluster.node("a").health is NodeHealth.LOST) == lost
        fenced = [msgspec.to_builtins(one)["node"] for one in cluster.last.commands]
        assert fenced == ([] if origin else ["a"])
        cluster.wait(FENCE_MS)
        cluster.step(nodes=(cluster.books["b"].report(),), fences=True)
        assert cluster.node("a").health is NodeHealth.LOST


def test_as_before_counts_though_a_copy_of_an_old_report_waits_for_the_same_step() -> None:
    cluster = Cluster()
    copy = msgspec.structs.replace(book().report(), incarnation=1, sequence=1)
    cluster.hear_reports(copy)
    cluster.wait(cluster.policy.silent_after_ms - 1)
    cluster.controller.hear(copy)
    assert cluster.controller.still(Still("a", 1, 1))
    cluster.step()
    cluster.wait(cluster.policy.silent_after_ms - 1)
    cluster.step()
    assert cluster.node("a").health is NodeHealth.READY
