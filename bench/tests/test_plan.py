"""What the predictions are held to: a change of the formulas must not make them worse."""

from __future__ import annotations

import pytest

from bench import plan
from shoal.plan.search import search

# Beyond 25 %: docs/plan-formulas.md says why. A row may leave this list, none may join it.
MISSED = {"MT-NLG 530B on 3360 A100"}


def test_the_published_runs_are_predicted_within_the_goal() -> None:
    compared = [plan.compare(row) for row in plan.rows()]
    told = plan.summary(compared)
    assert told["median_error"] <= 0.065  # 5.5 % when this was written; the goal is 10 %
    assert set(told["beyond_goal"]) <= MISSED
    assert told["worst_error"] <= 0.28
    assert len(told["calibrated"]) <= 3
    assert told["judged"] >= 16


def test_every_row_names_its_source_and_its_layout_is_valid() -> None:
    rows = plan.rows()
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert "http" in row.source, row.name
        assert row.layout.gpus == plan.case(row)[1].gpus, row.name


def test_interruptions_are_predicted_within_a_factor_of_two() -> None:
    told = plan.interruptions()
    assert len(told) >= 3
    for one in told:
        assert one.least / 2 <= one.predicted() <= one.most * 2, one.name


@pytest.mark.parametrize("name", ["Llama 3 405B on 16384 H100, 8K tokens"])
def test_the_search_finds_a_layout_at_least_as_fast_as_the_one_that_ran(name: str) -> None:
    row = next(row for row in plan.rows() if row.name == name)
    model, cluster = plan.case(row)
    best = search(model, cluster, row.layout.batch, row.stack, keep=1).best
    assert best.tokens_s >= 0.98 * plan.compare(row).found.tokens_s
