"""The trials of a sweep side by side: what each was given, what it reached and what it cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

TRIALS_MAX = 10_000  # of one sweep that can be put in order; those of a larger one are left out
PAGE_MAX = 1_000
LOSS = "loss"
STOPPED_EARLY = "stopped early"  # the state of a trial that halving has ended

Key = float | str | None


class Extent(msgspec.Struct, kw_only=True):
    """What a metric has been, and at which steps. `last` None: it is not a number now."""

    last: float | None = None
    step: int = 0  # of the last value
    low: float | None = None
    low_step: int = 0
    high: float | None = None
    high_step: int = 0

    def take(self, value: float, step: int) -> None:
        self.last, self.step = (value if math.isfinite(value) else None), step
        if self.last is None:
            return
        if self.low is None or value < self.low:
            self.low, self.low_step = value, step
        if self.high is None or value > self.high:
            self.high, self.high_step = value, step

    def best(self, *, highest: bool) -> float | None:
        return self.high if highest else self.low


class Trial(msgspec.Struct, kw_only=True):
    """One element of the sweep. `cost` None: it has no price."""

    id: str
    index: int
    values: dict[str, str]
    state: str
    metrics: dict[str, Extent] = {}
    step: int = 0
    gpu_ms: float = 0
    cost: float | None = None
    why: str = ""  # why it was stopped early


class TrialsView(msgspec.Struct, kw_only=True):
    """`trials` is a page of them, in the order asked for. `best` is the trial with the best value
    of the metric `by` ("": none has one). `left_out`: trials beyond the number that is looked at.
    """

    id: str
    name: str = ""
    state: str = ""
    variables: list[str]
    metrics: list[str]
    by: str
    highest: bool
    best: str
    total: int
    left_out: int = 0
    gpu_ms: float = 0  # of all trials
    cost: float | None = None
    currency: str = ""
    trials: list[Trial]


def best_of(trials: Sequence[Trial], by: str, *, highest: bool) -> Trial | None:
    def value(trial: Trial) -> float | None:
        extent = trial.metrics.get(by)
        return extent.best(highest=highest) if extent is not None else None

    known = [(found, trial) for trial in trials if (found := value(trial)) is not None]
    if not known:
        return None
    sign = -1 if highest else 1
    return min(known, key=lambda pair: (sign * pair[0], pair[1].index))[1]


FIELDS: dict[str, Callable[[Trial], Key]] = {
    "index": lambda trial: trial.index,
    "state": lambda trial: trial.state,
    "step": lambda trial: trial.step,
    "gpu_time": lambda trial: trial.gpu_ms,
    "cost": lambda trial: trial.cost,
}


def in_order(trials: Sequence[Trial], view: TrialsView, sort: str) -> list[Trial] | None:
    """`sort`: a variable, a metric (its best value), last.METRIC or one of `FIELDS`; with "-"
    before it, the largest first. Trials without a value come last. None: there is no such column.
    """
    down, name = sort.startswith("-"), sort.removeprefix("-")
    last = name.removeprefix("last.")

    def metric(trial: Trial) -> Key:
        extent = trial.metrics.get(last)
        if extent is None:
            return None
        return extent.best(highest=view.highest) if last == name else extent.last

    if name in view.variables:
        numbers = all(_number(trial.values[name]) is not None for trial in trials)
        key: Callable[[Trial], Key] = lambda trial: (  # noqa: E731
            _number(trial.values[name]) if numbers else trial.values[name]
        )
    elif last in view.metrics:
        key = metric
    elif name in FIELDS:
        key = FIELDS[name]
    else:
        return None
    keyed = [(key(trial), trial) for trial in trials]
    known = [(value, trial) for value, trial in keyed if value is not None]
    known.sort(key=lambda pair: pair[0], reverse=down)
    return [trial for _, trial in known] + [trial for value, trial in keyed if value is None]


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None
