"""The tables and plots of `shoal plan`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.cli.screen import show
from shoal.cli.screen.show import Cell, Column, bar, line, note
from shoal.model.amounts import money_text
from shoal.model.durations import duration_text
from shoal.plan.inverse import Inverse
from shoal.plan.money import Rates
from shoal.plan.report import Plan, Point
from shoal.plan.search import count_text, many
from shoal.plan.serving import Choice, Serving
from shoal.sim.replay.sizing import Answer, Goal, Size

BAR = 24
GIB = 2**30
PARTS = {
    "matmul": "matrix products",
    "attention": "attention",
    "moving": "kernels bound by memory",
    "recompute": "recomputation",
    "tensor": "tensor groups",
    "context": "context groups",
    "expert": "tokens to experts",
    "pipeline": "between stages",
    "bubble": "pipeline bubble",
    "data": "gradients and weights",
    "optimizer": "optimizer",
    "other": "gaps",
}


def table(columns: Sequence[Column], rows: Sequence[Sequence[str | Cell]]) -> None:
    """A pipe gets no bars: their columns have no title."""
    kept = [at for at, column in enumerate(columns) if column.title or show.at_terminal()]
    show.table([columns[at] for at in kept], [[row[at] for at in kept] for row in rows])


def bytes_text(value: float) -> str:
    for size, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def seconds_text(value: float) -> str:
    return duration_text(int(1000 * value)) if value < 1e12 else "never"


def step_text(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"


def energy_text(kwh: float) -> str:
    return f"{kwh / 1000:,.0f} MWh" if kwh >= 10_000 else f"{kwh:,.0f} kWh"


def weight_text(kg: float) -> str:
    return f"{kg / 1000:,.1f} t" if kg >= 1000 else f"{kg:,.0f} kg"


def cost_text(value: float | None, currency: str) -> str:
    return "unknown" if value is None else money_text(value, currency)


def print_plan(plan: Plan) -> None:
    best, faults, cost = plan.best, plan.faults, plan.cost
    line(
        f"{plan.model} ({count_text(plan.parameters)} parameters), {count_text(plan.tokens)} "
        f"tokens on {many(plan.nodes, 'node')} with {plan.gpus:,} x {plan.gpu}"
    )
    line(plan.verdict, "bold")
    line("")
    share = f"{best.memory.total / GIB:.0f} of {plan.memory_room / GIB:.0f} GiB"
    reserve = f"{best.memory.reserve / GIB:.0f} GiB of it for the driver, NCCL and fragments"
    rows = [
        ("time to train", seconds_text(plan.time_s)),
        ("layout", plan.layout),
        ("step", f"{step_text(best.step_s)}, {count_text(plan.batch * plan.sequence)} tokens"),
        ("MFU", f"{best.mfu:.1%}, {best.tflops:.0f} TFLOP/s on each GPU"),
        ("throughput", f"{count_text(best.tokens_s)} tokens/s"),
        ("memory", f"{share} on the fullest GPU, {reserve}"),
        (
            "failures",
            f"{faults.failures_per_day:.2g} a day, one every {seconds_text(faults.mean_between_s)}",
        ),
        (
            "checkpoint",
            f"{bytes_text(faults.checkpoint_bytes)}, {faults.save_s:.1f} s to save, "
            f"best every {seconds_text(faults.interval_s)}",
        ),
        (
            "goodput",
            f"{faults.goodput:.1%}: {faults.saving:.1%} saving, {faults.repeating:.1%} "
            f"repeated, {faults.restarting:.1%} restarting",
        ),
        (
            "storage",
            f"{bytes_text(faults.storage_needed_bytes_per_s)}/s so that checkpoints cost "
            f"at most 3%; data {bytes_text(plan.read_bytes_per_s)}/s",
        ),
        (
            "network",
            f"{bytes_text(plan.network_bytes_per_s)}/s from each GPU to other nodes; "
            f"bisection {bytes_text(plan.bisection_bytes_per_s)}/s",
        ),
        ("GPU-hours", count_text(cost.gpu_hours)),
        ("cost", f"{cost_text(cost.money, cost.currency)} ({cost.price_source})"),
    ]
    if cost.power_w is not None and cost.energy_kwh is not None:
        co2 = "" if cost.co2_kg is None else f", {weight_text(cost.co2_kg)} CO2"
        power = f"{cost.power_w / 1000:,.0f} kW, {energy_text(cost.energy_kwh)}{co2}"
        rows.append(("power", power))
    table([Column("FIGURE", rank=1), Column("VALUE", wraps=True)], rows)
    _print_time(plan)
    _print_layouts(plan)
    _print_memory(plan)
    _print_sizes(plan.sizes, plan.nodes, cost.currency)
    _print_limits(plan)


def _print_time(plan: Plan) -> None:
    line("")
    parts = [(name, getattr(plan.parts, name)) for name in PARTS]
    parts = sorted(
        (pair for pair in parts if pair[1] > 0.001 * plan.best.step_s), key=lambda pair: -pair[1]
    )
    rows: list[list[str | Cell]] = [
        [
            PARTS[name],
            f"{took / plan.best.step_s:.1%}",
            Cell("", pretty=bar(took, plan.best.step_s, BAR)),
        ]
        for name, took in parts
    ]
    table([Column("WHERE THE STEP GOES"), Column("SHARE", right=True), Column("")], rows)


def _print_layouts(plan: Plan) -> None:
    line("")
    fast = max(plan.layouts, key=lambda one: one.mfu).mfu
    rows: list[list[str | Cell]] = [
        [
            Cell(f"{one.mfu:.1%}", pretty=f"{one.mfu:.1%} {bar(one.mfu, fast, 10)}"),
            seconds_text(one.time_s),
            one.layout,
        ]
        for one in plan.layouts
    ]
    columns = [Column("MFU", rank=1), Column("TIME", right=True, rank=1)]
    table([*columns, Column("LAYOUTS, BEST FIRST", wraps=True)], rows)
    losing = [one for one in plan.families if one.reason]
    if losing:
        line("")
        table(
            [Column("OTHER FAMILIES", rank=1), Column("WHY NOT", wraps=True)],
            [[one.name, one.reason] for one in losing[:8]],
        )


def _print_memory(plan: Plan) -> None:
    line("")
    room = plan.memory_room
    rows: list[list[str | Cell]] = []
    for one in plan.kinds:
        used = one.memory
        state = used.weights + used.gradients + used.optimizer
        rows.append(
            [
                one.name,
                f"{state / GIB:,.0f}",
                f"{(used.activations + used.logits) / GIB:,.0f}",
                f"{used.total / GIB:,.0f} GiB",
                Cell("yes", "green") if one.fits else Cell("no", "red"),
            ]
        )
    columns = [
        Column("MEMORY OF A GPU, BY ONE KIND"),
        Column("STATES", True),
        Column("ACTIVATIONS", True),
    ]
    table([*columns, Column("ALL", True), Column(f"FITS {room / GIB:.0f}")], rows)


def _print_sizes(points: list[Point], here: int, currency: str) -> None:
    line("")
    longest = max(one.time_s for one in points)
    dearest = max((one.money or 0.0 for one in points), default=0.0)
    rows: list[list[str | Cell]] = [
        [
            Cell(f"{one.nodes:,}", "bold" if one.nodes == here else ""),
            f"{one.gpus:,}",
            seconds_text(one.time_s),
            Cell("", pretty=bar(one.time_s, longest, 12)),
            cost_text(one.money, currency),
            Cell("", pretty=bar(one.money or 0.0, dearest, 12)),
            f"{one.mfu:.0%}",
        ]
        for one in points
    ]
    columns = [Column("NODES", True), Column("GPUS", True), Column("TIME", True), Column("")]
    table([*columns, Column("COST", True), Column(""), Column("MFU", True)], rows)


def _print_limits(plan: Plan) -> None:
    line("")
    rows: list[list[str | Cell]] = [
        [
            one.words,
            f"{one.gain:+.1%}",
            Cell("", pretty=bar(max(0.0, one.gain), 0.1, 10)),
        ]
        for one in plan.limits
    ]
    table([Column("10% MORE OF"), Column("SPEED", True), Column("")], rows)
    note("note: an estimate, not a measurement; docs/plan.md explains each figure")
    if plan.warning:
        note(f"warning: {plan.warning}")


def print_inverse(found: Inverse, rates: Rates) -> None:
    one = found.chosen
    goal = (
        "the smallest cluster that meets the deadline"
        if found.limit == "deadline"
        else "the fastest cluster that the budget pays for"
    )
    line(
        f"{goal}: {many(one.nodes, 'node')} ({many(one.gpus, 'GPU')}), {seconds_text(one.time_s)}, "
        f"{cost_text(one.money, rates.currency)}",
        "bold",
    )
    cheap = found.cheaper
    if cheap is not None:
        line(
            f"{many(cheap.nodes, 'node')} would cost less: "
            f"{cost_text(cheap.money, rates.currency)}, {seconds_text(cheap.time_s)}"
        )
    _print_sizes(found.tried, one.nodes, rates.currency)
    line("")


def print_serving(found: Serving, rates: Rates, per_month: dict[int, float | None]) -> None:
    best = found.choices[0]
    line(
        f"{many(best.replicas, 'replica')} with {many(best.gpus, 'GPU')} each: "
        f"{many(best.total_gpus, 'GPU')}, "
        f"{cost_text(per_month[best.gpus], rates.currency)} a month ({rates.price_source})",
        "bold",
    )
    line("")
    rows: list[list[str | Cell]] = []
    for one in found.choices:
        rows.append(
            [
                str(one.gpus),
                f"{one.replicas:,}",
                f"{one.total_gpus:,}",
                f"{one.rate_max:.3g}/s",
                *_latency(one),
                cost_text(per_month[one.gpus], rates.currency),
            ]
        )
    columns = [
        Column("GPUS EACH", True),
        Column("REPLICAS", True),
        Column("GPUS", True),
        Column("MOST EACH", True),
    ]
    columns += [Column("TTFT P90", True), Column("TPOT P90", True), Column("BATCH", True)]
    table([*columns, Column("A MONTH", True)], rows)
    for gpus, why in found.problems.items():
        note(f"{many(gpus, 'GPU')} each: {why}")
    more = best.replicas + 1
    note(f"note: {more} replicas still meet the goals when one is lost")


def _latency(one: Choice) -> list[str]:
    if one.latency is None:
        return ["measured", "measured", ""]
    shown = one.latency
    return [
        f"{1000 * shown.ttft_p90_s:.0f} ms",
        f"{1000 * shown.tpot_p90_s:.1f} ms",
        f"{shown.batch:.0f}",
    ]


def print_sizing(answer: Answer, goal: Goal, currency: str, per_node_month: float | None) -> None:
    """The nodes that a goal needs, and every size that was replayed."""
    now, best = answer.now, answer.best
    kind = (
        f"{answer.kind.gpus} GPUs" if answer.kind.gpus else f"{answer.kind.cpu_milli // 1000} CPUs"
    )
    wanted = f"{goal.name} < {duration_text(goal.below_ms)}"
    if best is None:
        line(f"{wanted}: no size up to {answer.tried[-1].nodes:,} nodes meets it", "bold")
    else:
        change = best.nodes - now.nodes
        cost = (
            ""
            if per_node_month is None
            else f", {money_text(abs(change) * per_node_month, currency)} a month"
        )
        words = (
            f"{change:,} more nodes with {kind}{cost}"
            if change > 0
            else "the nodes that you have suffice"
        )
        if change < 0:
            less = f"{cost} less" if cost else ""
            words = f"{-change:,} fewer nodes with {kind} would do{less}"
        line(f"{wanted}: {words} ({now.nodes:,} now, {best.nodes:,} needed)", "bold")
    line("")
    worst = max((one.value_ms or 0.0 for one in answer.tried), default=0.0)
    rows = [_size_row(one, now, best, worst) for one in answer.tried]
    table(
        [
            Column("NODES", True),
            Column("GPUS", True),
            Column(goal.name.upper(), True),
            Column(""),
            Column("USED", True),
            Column("GOAL"),
        ],
        rows,
    )


def _size_row(one: Size, now: Size, best: Size | None, worst: float) -> list[str | Cell]:
    words = "met" if one.met else "missed"
    marks = [text for text, other in (("now", now), ("smallest", best)) if one == other]
    value = "some jobs do not fit" if one.value_ms is None else duration_text(int(one.value_ms))
    shown = Cell("", pretty=bar(one.value_ms or 0.0, worst + 1, BAR))
    mark = f"{words} ({', '.join(marks)})" if marks else words
    return [
        f"{one.nodes:,}",
        f"{one.gpus:,}",
        value,
        shown,
        f"{one.utilization:.0%}",
        Cell(mark, "green" if one.met else ""),
    ]


def as_document(plan: Plan, inverse: Inverse | None) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(plan)
    return {**fields, "inverse": inverse} if inverse is not None else fields
