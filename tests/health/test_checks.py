"""The agent's side of checks: one probe at a time, each id once, and an end in any case."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from shoal.agent import checks
from shoal.agent.checks import RESULTS_KEPT, Checks
from shoal.model.commands import Check
from shoal.model.health import CheckResult
from shoal.model.node import NodeSpec

SPEC = NodeSpec(id="n1", cpu_milli=1000, memory_mb=100)


def order(number: int) -> Check:
    return Check(node="n1", incarnation=1, id=f"c{number}")


def made(directory: Path, probe: Sequence[str] = checks.PROBE) -> Checks:
    return Checks(directory, SPEC, probe)


def wait(asked: Checks) -> None:
    """As the agent does: the child is waited for, then told of."""
    (pid,) = asked.pids()
    _, status = os.waitpid(pid, 0)
    assert asked.ended(pid, os.waitstatus_to_exitcode(status))


def test_the_real_probe_measures_the_node_once(tmp_path: Path) -> None:
    asked = made(tmp_path)
    asked.ask(order(1), busy=True)
    asked.ask(order(1), busy=True)
    assert len(asked.pids()) == 1
    wait(asked)
    (result,) = asked.results()
    assert (result.id, result.busy, result.error) == ("c1", True, "")
    assert result.figures["memory_mbs"] > 0
    asked.ask(order(1), busy=True)
    assert asked.pids() == set()


def test_one_runs_at_a_time_and_the_newest_wish_is_next(tmp_path: Path) -> None:
    asked = made(tmp_path, ["echo"])
    for number in (1, 2, 3):
        asked.ask(order(number), busy=False)
        assert len(asked.pids()) == 1
    wait(asked)
    wait(asked)
    assert asked.pids() == set()
    assert [result.id for result in asked.results()] == ["c1", "c3"]


def test_a_probe_that_never_ends_is_killed_and_that_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = made(tmp_path, ["sh", "-c", "sleep 1000"])
    asked.ask(order(1), busy=False)
    asked.tend()  # there is time yet
    os.kill(next(iter(asked.pids())), 0)
    monkeypatch.setattr(checks, "time", SimpleNamespace(monotonic=lambda: 1e12))
    asked.tend()
    wait(asked)
    assert asked.results()[0].faults == ("the probe did not end within 60 s",)


@pytest.mark.parametrize("probe", [["echo", "nonsense"], ["false"], ["/does/not/exist"]])
def test_a_probe_that_fails_says_nothing_against_the_node(tmp_path: Path, probe: list[str]) -> None:
    asked = made(tmp_path, probe)
    asked.ask(order(1), busy=False)
    if asked.pids():
        wait(asked)
    (result,) = asked.results()
    assert result.error
    assert result.faults == ()


def test_other_children_are_none_of_its_business(tmp_path: Path) -> None:
    assert not made(tmp_path).ended(12345, 0)


def test_few_results_are_kept(tmp_path: Path) -> None:
    asked = made(tmp_path, ["/does/not/exist"])
    for number in range(RESULTS_KEPT + 3):
        asked.ask(order(number), busy=False)
    assert [result.id for result in asked.results()] == ["c3", "c4", "c5", "c6"]


def test_a_check_and_its_result_survive_the_wire() -> None:
    check = order(1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(check), type=Check) == check
    result = CheckResult(id="c1", busy=True, figures={"a": 1}, faults=("f",), notes=("n",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=CheckResult) == result
