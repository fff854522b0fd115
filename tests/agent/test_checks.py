"""The agent's side of checks: one probe at a time, each id once, and an end in any case."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from shoal.agent import checks
from shoal.agent.checks import Checks
from shoal.core.nodebook import CHECKS_KEPT, NodeBook
from shoal.model.commands import Check, Envelope
from shoal.model.fabric import Host, Tour
from shoal.model.health import CheckResult
from shoal.model.job import MemberRef
from shoal.model.node import NodeSpec
from tests.agent.rig import Rig, rig

SPEC = NodeSpec(id="n1", cpu_milli=1000, memory_mb=100)


def order(number: int) -> Check:
    return Check(node="n1", incarnation=1, id=f"c{number}")


class Asked(Checks):
    """With the results as they came."""

    def __init__(
        self,
        directory: Path,
        probe: Sequence[str] = checks.PROBE,
        tour: Sequence[str] = checks.TOUR,
    ) -> None:
        self.results: list[CheckResult] = []
        super().__init__(directory, SPEC, self.results.append, probe, tour)


def wait(asked: Asked, pid: int = 0) -> None:
    """As the agent does: the child is waited for, then told of."""
    if not pid:
        (pid,) = asked.pids()
    _, status = os.waitpid(pid, 0)
    assert asked.ended(pid, os.waitstatus_to_exitcode(status))


def test_the_real_probe_measures_the_node_once(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.ask(order(1), busy=True)
    asked.ask(order(1), busy=True)
    assert len(asked.pids()) == 1
    wait(asked)
    (result,) = asked.results
    assert (result.id, result.busy, result.error) == ("c1", True, "")
    assert result.figures["memory_mbs"] > 0
    assert asked.pids() == set()


def test_one_runs_at_a_time_and_the_newest_wish_is_next(tmp_path: Path) -> None:
    asked = Asked(tmp_path, ["echo"])
    for number in (1, 2, 3):
        asked.ask(order(number), busy=False)
        assert len(asked.pids()) == 1
    wait(asked)
    wait(asked)
    assert asked.pids() == set()
    assert [result.id for result in asked.results] == ["c1", "c3"]


def test_a_probe_that_never_ends_is_killed_and_that_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(tmp_path, ["sh", "-c", "sleep 1000"])
    asked.ask(order(1), busy=False)
    asked.tend()  # there is time yet
    os.kill(next(iter(asked.pids())), 0)
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: 1e12))
    asked.tend()
    wait(asked)
    assert asked.results[0].faults == ("the probe did not end within 60 s",)


@pytest.mark.parametrize("probe", [["echo", "nonsense"], ["false"], ["/does/not/exist"]])
def test_a_probe_that_fails_says_nothing_against_the_node(tmp_path: Path, probe: list[str]) -> None:
    asked = Asked(tmp_path, probe)
    asked.ask(order(1), busy=False)
    if asked.pids():
        wait(asked)
    (result,) = asked.results
    assert result.error
    assert result.faults == ()


def tour(number: int, limit_ms: int = 1_000) -> Check:
    asked = Tour(hosts=(Host("n1", "127.0.0.1", 1),), own=0, key="secret", limit_ms=limit_ms)
    return Check(node="n1", incarnation=1, id=f"t{number}", tour=asked)


def test_a_tour_does_not_wait_for_a_check_and_both_count_as_disturbed(tmp_path: Path) -> None:
    answer = ["sh", "-c", "sleep 1000 & wait"]
    asked = Asked(tmp_path, answer, ["sh", "-c", 'echo {\\"id\\": \\"\\"}'])
    asked.ask(order(1), busy=False)
    (check,) = asked.pids()
    asked.ask(tour(1), busy=False)
    asked.ask(tour(1), busy=False)
    (pid,) = asked.pids() - {check}
    wait(asked, pid)
    assert asked.results == [CheckResult(id="t1", busy=True)]
    assert (tmp_path / "tour.json").stat().st_mode & 0o777 == 0o600  # it has the key
    os.killpg(check, signal.SIGKILL)
    wait(asked)
    assert (asked.results[1].id, asked.results[1].busy) == ("c1", True)


def test_a_later_tour_ends_the_one_before_at_once(tmp_path: Path) -> None:
    asked = Asked(tmp_path, tour=["sh", "-c", "sleep 1000 & wait"])
    asked.ask(tour(1), busy=False)
    (first,) = asked.pids()
    asked.ask(tour(2), busy=False)
    wait(asked, first)
    assert asked.results == [CheckResult(id="t1", error="a later tour has begun")]
    (second,) = asked.pids()
    asked.ask(tour(2), busy=False)  # sent again: it runs on
    assert asked.pids() == {second}
    os.killpg(second, signal.SIGKILL)
    wait(asked)
    assert asked.results[1].error.startswith("the probe ended with code -9")


def test_a_tour_that_never_ends_is_killed_and_one_that_cannot_start_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(tmp_path, tour=["/does/not/exist"])
    asked.ask(tour(1), busy=False)
    assert "the probe cannot start" in asked.results[0].error
    asked = Asked(tmp_path, tour=["sh", "-c", "sleep 1000"])
    asked.ask(tour(2, limit_ms=90_000), busy=False)
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: 1e12))
    asked.tend()
    wait(asked)
    assert asked.results[0].faults == ("the probe did not end within 95 s",)


def test_other_children_are_none_of_its_business(tmp_path: Path) -> None:
    assert not Asked(tmp_path).ended(12345, 0)


def test_the_book_tells_of_a_check_until_newer_ones_came_and_asks_for_none_twice() -> None:
    book = NodeBook(SPEC, 1)
    for number in range(1, CHECKS_KEPT + 3):
        assert book.take(Envelope(1, 2 * number, (order(number),))) == [order(number)]
        book.measured(CheckResult(id=f"c{number}"))
        assert book.take(Envelope(1, 2 * number + 1, (order(number),))) == []
        assert book.report().checks[-1].id == f"c{number}"
    assert [result.id for result in book.report().checks] == ["c3", "c4", "c5", "c6"]
    later = msgspec.structs.replace(order(9), incarnation=2)
    assert book.take(Envelope(2, 1, (later,))) == []


def test_a_check_and_its_result_survive_the_wire() -> None:
    check = order(1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(check), type=Check) == check
    result = CheckResult(id="c1", busy=True, figures={"a": 1}, faults=("f",), notes=("n",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=CheckResult) == result


def test_a_real_agent_measures_its_node_while_members_come_and_go() -> None:
    """Whoever ends makes the agent look for strays: the probe must not be taken for one."""
    with rig() as agent:
        incarnation = agent.ask().incarnation
        for name in ("c1", "c2"):
            agent.order(Check(node="n1", incarnation=incarnation, id=name))
        for number in range(5):
            agent.launch(MemberRef("j1", 1, number), "true")
            assert agent.exit(MemberRef("j1", 1, number)).code == 0
        assert agent.until(lambda: len(told(agent)) == 2)
        for result, name in zip(told(agent), ("c1", "c2"), strict=True):
            assert (result.id, result.error) == (name, "")
            assert result.figures["memory_mbs"] > 0
        assert not list(agent.directory.glob(".probe-*"))


def told(agent: Rig) -> tuple[CheckResult, ...]:
    return agent.report.checks if agent.report is not None else ()
