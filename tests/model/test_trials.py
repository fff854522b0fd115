"""Trials side by side: the best, any order, and values that are not numbers."""

from __future__ import annotations

import math

import pytest

from shoal.control.history.jobs import JobHistory, JobSample
from shoal.model.trials import Extent, Trial, TrialsView, best_of, in_order


def trial(index: int, lr: str, state: str, *losses: float) -> Trial:
    metrics = {"loss": Extent()} if losses else {}
    for step, loss in enumerate(losses):
        metrics["loss"].take(loss, step)
    return Trial(id=f"j1.{index}", index=index, values={"lr": lr}, state=state, metrics=metrics)


TRIALS = [
    trial(0, "0.1", "succeeded", 3.0, 1.0, 2.0),
    trial(1, "1e-3", "running", 2.0, 1.5),
    trial(2, "10", "pending"),
    trial(3, "0.02", "failed", 9.0, math.nan),
]


def view(*, highest: bool = False) -> TrialsView:
    return TrialsView(
        id="j1", variables=["lr"], metrics=["loss"], by="loss", highest=highest, best="",
        total=4, trials=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sort", "highest", "order"),
    [
        ("loss", False, [0, 1, 3, 2]),  # by its best; a trial without a value comes last
        ("-loss", False, [3, 1, 0, 2]),
        ("-loss", True, [3, 0, 1, 2]),
        ("last.loss", False, [1, 0, 2, 3]),  # a loss that is not a number now is no value
        ("lr", False, [1, 3, 0, 2]),  # as numbers, not as text
        ("-lr", False, [2, 0, 3, 1]),
        ("state", False, [3, 2, 1, 0]),
        ("index", False, [0, 1, 2, 3]),
    ],
)
def test_trials_are_put_in_order_by_any_column(sort: str, highest: bool, order: list[int]) -> None:
    ordered = in_order(TRIALS, view(highest=highest), sort)
    assert ordered is not None
    assert [one.index for one in ordered] == order


def test_an_unknown_column_is_none_and_the_best_is_by_the_metric() -> None:
    assert in_order(TRIALS, view(), "width") is None
    lowest, highest = (best_of(TRIALS, "loss", highest=up) for up in (False, True))
    assert (lowest and lowest.id, highest and highest.id) == ("j1.0", "j1.3")
    assert best_of(TRIALS, "accuracy", highest=True) is None


def test_the_best_value_of_a_trial_outlives_the_mean_of_its_curve() -> None:
    """A curve of many points keeps means; what earlier versions kept has only the curve."""
    history = JobHistory("j7.1")
    for step in range(1, 2_000):
        loss = 0.5 if step == 700 else 2.0
        history.take(JobSample("j7.1", step * 2_000, 1, (), step, loss, 1.0, {"acc": step}, []))
    again = JobHistory("j7.1", history.body()).extents()
    assert (again["loss"].low, again["loss"].low_step, again["loss"].last) == (0.5, 700, 2.0)
    assert (again["acc"].high, again["acc"].high_step) == (1999, 1999)
    plain = JobHistory("j7")  # no trial: nothing is kept beside its curves
    plain.take(JobSample("j7", 1_000, 1, (), 5, 3.0, 1.0, {}, []))
    assert b"extents\x80" in plain.body()
    assert JobHistory("j7", plain.body()).extents()["loss"] == Extent(
        last=3.0, step=5, low=3.0, low_step=5, high=3.0, high_step=5
    )
