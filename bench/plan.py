"""Predicted against published: the step of known training runs, with the error of each.

python -m bench.plan            every row, and what the search would have chosen
python -m bench.plan --parts    also where the time of each row goes
"""

from __future__ import annotations

import argparse
import json
import statistics
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from bench.figures import table
from shoal.plan import library, report
from shoal.plan.hardware import Cluster, Impossible
from shoal.plan.layout import Layout, Stack
from shoal.plan.model import Model
from shoal.plan.search import search
from shoal.plan.step import Estimate, Parts, estimate

ROWS = Path(__file__).with_name("plan_rows.toml")
GOAL_MEDIAN = 0.10
GOAL_WORST = 0.25
Metric = Literal["step_s", "tokens_s_gpu", "mfu", "hardware", "causal"]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published run."""

    name: str
    model: str
    metric: Metric
    published: float
    node: str
    nodes: int
    layout: Layout
    source: str
    stack: Stack = Stack()
    fabric: str = "infiniband"
    shape: dict[str, int] = {}  # what differs from the model of that name
    calibrated: bool = False  # constants of the code were set with it
    assumed: str = ""  # what its authors do not say


class Interruptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a published run was interrupted."""

    name: str
    gpus: int
    days: float
    least: float
    most: float
    source: str
    calibrated: bool = False  # the rate is taken from it

    def predicted(self) -> float:
        return self.days * 86_400 / report.mean_between_s(self.gpus)


class Compared(msgspec.Struct, frozen=True):
    row: Row
    found: Estimate
    predicted: float
    error: float  # of the speed: above 0, the prediction is too fast


def rows() -> list[Row]:
    return msgspec.convert(tomllib.loads(ROWS.read_text())["rows"], list[Row], strict=False)


def interruptions() -> list[Interruptions]:
    found = tomllib.loads(ROWS.read_text())["interruptions"]
    return msgspec.convert(found, list[Interruptions], strict=False)


def case(row: Row) -> tuple[Model, Cluster]:
    model = msgspec.structs.replace(library.model(row.model), **row.shape)
    kind = library.hardware().node(row.node)
    cluster = library.hardware().cluster(
        kind.accelerator, row.nodes, node=row.node, fabric=row.fabric
    )
    return model, cluster


def compare(row: Row) -> Compared:
    model, cluster = case(row)
    found = estimate(model, cluster, row.layout, row.stack)
    predicted = in_units(row, model, cluster, found)
    error = predicted / row.published - 1
    if row.metric == "step_s":
        error = row.published / predicted - 1
    return Compared(row, found, predicted, error)


def in_units(row: Row, model: Model, cluster: Cluster, found: Estimate) -> float:
    per_gpu = found.tokens_s / cluster.gpus
    if row.metric == "step_s":
        return found.step_s
    if row.metric == "tokens_s_gpu":
        return per_gpu
    if row.metric == "mfu":
        return found.mfu * 100
    if row.metric == "hardware":
        hidden, layers = model.hidden, model.layers
        squares = 96.0 * layers * hidden * hidden
        rest = 1 + model.sequence / (6 * hidden) + model.vocab / (16 * layers * hidden)
        return squares * rest * per_gpu / 1e12
    half = 1.5 * model.layers * model.attention_flops()
    return (model.flops_per_token() - half) * per_gpu / 1e12


def chosen(row: Row) -> str:
    """What the search would have run on the same GPUs with the same batch and software."""
    model, cluster = case(row)
    try:
        best = search(model, cluster, row.layout.batch, row.stack, keep=1).best
    except Impossible as reason:
        return str(reason)
    return f"{best.layout.words()}: {best.step_s:.3g} s"


def summary(compared: list[Compared]) -> dict[str, Any]:
    judged = [one for one in compared if not one.row.calibrated]
    errors = [abs(one.error) for one in judged]
    worst = max(judged, key=lambda one: abs(one.error))
    return {
        "rows": len(compared),
        "judged": len(judged),
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(abs(worst.error), 4),
        "worst_row": worst.row.name,
        "beyond_goal": [one.row.name for one in judged if abs(one.error) > GOAL_WORST],
        "calibrated": [one.row.name for one in compared if one.row.calibrated],
        "interruptions": {one.name: round(one.predicted(), 1) for one in interruptions()},
        "errors": {one.row.name: round(one.error, 4) for one in compared},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parts", action="store_true", help="where the time of each row goes")
    told = parser.parse_args()
    compared = [compare(row) for row in rows()]
    print("Predicted against published. An error above 0: the prediction is too fast.")
    print(table(("run", "metric", "published", "predicted", "error", "GiB"), map(line, compared)))
    print("* calibrated with these rows: they do not count for the median and the worst\n")
    if told.parts:
        names = Parts.__struct_fields__
        print(table(("share of the step in %", *names), (shares(one) for one in compared)), "\n")
    print("Interruptions of a run, at the failure rate that a plan assumes:")
    header = ("run", "GPUs", "days", "published", "predicted")
    print(table(header, map(interruption_line, interruptions())), "\n")
    print("What the search would have chosen, with the same batch and software:")
    for one in compared:
        ran = f"{one.row.layout.words()}: {one.found.step_s:.3g} s"
        print(f"{one.row.name}\n    ran     {ran}\n    search  {chosen(one.row)}")
    for one in compared:
        if one.row.assumed:
            print(f"assumed for {one.row.name}: {one.row.assumed}")
    print(json.dumps(summary(compared)))


def line(one: Compared) -> tuple[object, ...]:
    row = one.row
    return (
        row.name + (" *" if row.calibrated else ""),
        row.metric,
        f"{row.published:g}",
        f"{one.predicted:.4g}",
        f"{one.error:+.1%}",
        f"{one.found.memory.total / 2**30:.0f}",
    )


def interruption_line(one: Interruptions) -> tuple[object, ...]:
    name = one.name + (" *" if one.calibrated else "")
    return name, one.gpus, f"{one.days:g}", f"{one.least:g}-{one.most:g}", f"{one.predicted():.0f}"


def shares(one: Compared) -> tuple[object, ...]:
    seconds = msgspec.structs.astuple(one.found.parts)
    return (one.row.name, *(f"{100 * part / one.found.step_s:.1f}" for part in seconds))


if __name__ == "__main__":
    main()
