"""A package that somebody else wrote brings functions by entry points, as installed ones do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.packages import describe

from shoal.control import plugins
from shoal.core.state.state import State
from shoal.core.step import step
from shoal.model.job import JobSpec
from shoal.model.policy import Policy
from shoal.model.report import Report, Submit

MODULE = """
from shoal.core.scheduling.order import Ordering

largest_first = Ordering(job=lambda job: -job.spec.gpus)

def corner(state, kind, before, after):
    return (after.gpus,)
"""
FUNCTIONS = {"largest": "largest_first", "corner": "corner", "broken": "absent"}
PROJECT = {
    "name": "brought-by-others",
    "entry-points": {
        "shoal.policy": {name: f"brought_by_others:{value}" for name, value in FUNCTIONS.items()}
    },
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "brought_by_others.py").write_text(MODULE)
    describe(PROJECT, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("brought_by_others", None)


def test_a_policy_names_the_functions_of_a_package(package: None) -> None:
    policy = Policy(order="largest", placement="corner")
    assert plugins.problem(policy) is None
    functions = plugins.PolicyFunctions().load(policy)
    state = State()
    jobs = [JobSpec(command=("work",), gpus=gpus) for gpus in (1, 4, 2)]
    step(state, Report(requests=tuple(map(Submit, jobs))), policy, 1_000, functions)
    (ordering,) = {state.ordering}
    assert ordering is functions.orders["largest"]
    ranks = [ordering.job(state.jobs[job_id]) for job_id in ("j1", "j2", "j3")]
    assert ranks == [-1, -4, -2]


def test_a_function_that_a_package_lost_is_refused_and_replaced(package: None) -> None:
    policy = Policy(placement="broken")
    assert (plugins.problem(policy) or "").startswith("placement: broken cannot be loaded: ")
    functions = plugins.PolicyFunctions()
    table = functions.load(policy)
    assert table.placement("broken") is table.placements["shoal"]
    assert "placement broken is replaced by shoal" in functions.alarm(policy)


def test_a_name_that_nobody_brings_is_refused_with_those_there_are() -> None:
    told = plugins.problem(Policy(order="largest")) or ""
    assert told.startswith("order: there is no order 'largest'; there are fair, fifo, srsf")
