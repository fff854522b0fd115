"""A report that breaks a step: its node is set aside by name, and nobody else is harmed."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from shoal.core.nodebook import NodeBook
from shoal.core.state.events.cluster import ControllerStarted
from shoal.core.step import step as real
from shoal.model.node import NodeHealth
from shoal.model.report import Accepted, Answer, NodeGone, Nothing, Submit
from shoal.tick import ASIDE_FIRST_MS, ASIDE_MS_MAX, Tick
from tests.control.test_loop import SPEC, HandClock, Rig
from tests.core.build import POLICY, Kept, node_spec


class Cluster:
    """Nodes that report in each round, of which some break each step that hears them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.now_ms, self.broken, self.bad = 1_000, 0, set[str]()
        self.kept = Kept()
        self.tick = Tick(self.kept, POLICY, lambda *_: None)
        self.books = {name: NodeBook(node_spec(name, gpus=1), 1) for name in names}
        self.tick.load()
        self.tick.begin(self.now_ms)

        def breaking(*args: Any) -> Any:
            done = real(*args)
            spoke = {one.spec.id for one in args[1].nodes} | {one.node for one in args[1].gone}
            if spoke & self.bad:
                raise IndexError("list index out of range")
            return done

        monkeypatch.setattr("shoal.tick.step", breaking)

    def round(self, *, all_report: bool = True) -> None:
        for book in self.books.values() if all_report else ():
            self.tick.hear(book.report())
        try:
            self.tick.run(self.now_ms, self.kept)
        except IndexError:
            self.broken += 1
            self.tick.load()
            self.tick.begin(self.now_ms)

    def settle(self) -> None:
        self.round()
        while self.tick.doubts.open:
            self.round()
        self.round()

    @property
    def ready(self) -> set[str]:
        nodes = self.tick.state.nodes.values()
        return {node.id for node in nodes if node.health is NodeHealth.READY}


def test_of_many_nodes_those_that_break_a_step_are_found_and_all_others_are_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"n{number}" for number in range(32)]
    made = Cluster(monkeypatch, *names)
    made.bad = {"n3", "n20"}
    reply: Future[Answer] = Future()
    made.tick.ask(Submit(SPEC), reply)
    made.round()
    made.round()
    assert reply.result(0) == Accepted("j1")  # before anybody is found
    made.settle()
    assert set(made.tick.doubts.aside) == made.bad
    assert made.ready == set(names) - made.bad
    assert made.broken <= 12  # 1, and 2 x 5 halvings of 32


def test_a_node_that_is_set_aside_is_tried_again_later_and_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Cluster(monkeypatch, "n1", "n2")
    made.bad = {"n2"}
    made.settle()
    first = made.tick.doubts.aside["n2"]
    assert first.for_ms == ASIDE_FIRST_MS
    assert "IndexError: list index out of range" in first.why
    before = made.broken
    made.now_ms = first.until_ms - 1
    made.settle()
    assert made.broken == before
    for _ in range(12):
        made.now_ms = made.tick.doubts.aside["n2"].until_ms
        made.settle()
    assert made.tick.doubts.aside["n2"].for_ms == ASIDE_MS_MAX
    assert "n2" in made.tick.doubts.alarm()
    made.now_ms, made.bad = made.tick.doubts.aside["n2"].until_ms, set()
    made.settle()
    assert made.ready == {"n1", "n2"}
    assert not made.tick.doubts.aside and not made.tick.doubts.alarm()


def test_a_death_notice_that_breaks_a_step_is_its_nodes_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Cluster(monkeypatch, "n1", "n2")
    made.settle()
    made.bad = {"n2"}
    made.tick.gone(NodeGone("n2", 1, "it is over"))
    for _ in range(3):
        made.round(all_report=False)
    assert list(made.tick.doubts.aside) == ["n2"]


def test_no_node_is_blamed_for_a_step_that_fails_without_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Cluster(monkeypatch, "n1", "n2")
    made.settle()

    def failing(*args: Any) -> Any:
        if args[1].requests:
            raise IndexError("the request is to blame")
        return real(*args)

    monkeypatch.setattr("shoal.tick.step", failing)
    reply: Future[Answer] = Future()
    made.tick.ask(Nothing(), reply)
    made.round()
    assert not reply.done()
    made.round(all_report=False)
    assert isinstance(reply.exception(0), IndexError)
    made.settle()
    assert not made.tick.doubts.aside
    assert made.ready == {"n1", "n2"}


def test_live_a_report_that_breaks_steps_costs_no_request_and_few_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.control.loop.RECOVERY_PAUSE_S", 0)
    rig = Rig(tmp_path)
    clock = rig.loop.clock
    assert isinstance(clock, HandClock)
    bad = NodeBook(node_spec("n2", gpus=1), 1)

    def breaking(*args: Any) -> Any:
        done = real(*args)
        if any(one.spec.id == "n2" for one in args[1].nodes):
            raise IndexError("list index out of range")
        return done

    monkeypatch.setattr("shoal.tick.step", breaking)

    async def work() -> None:
        for number in range(25):
            rig.loop.heard(bad.report())
            answer = await rig.loop.request(Submit(SPEC, f"k{number}"))
            assert answer == Accepted(f"j{number + 1}")

    rig.run(work())
    (alarm,) = rig.loop.alarms.texts
    assert alarm.startswith("n2 is set aside for 10s, because its report breaks a step: IndexError")
    epochs = [one for one in rig.store.events(0, 999) if isinstance(one.event, ControllerStarted)]
    assert len(epochs) <= 4  # the first, and one after each step that failed in the search
