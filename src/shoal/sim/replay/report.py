"""The page of a replay: one HTML file that needs nothing else, with plots of every policy."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec

from shoal.model.node import NodeSpec
from shoal.sim.replay.metrics import (
    FIGURES,
    MILLI,
    Levels,
    Outcome,
    Records,
    Summary,
    account_text,
    best,
    cost_text,
    quantile,
    time_text,
)
from shoal.sim.replay.report_page import TEMPLATE
from shoal.sim.replay.report_timeline import timeline
from shoal.sim.replay.traces import Trace, TraceError, sums

BINS = 400  # points of a line over time
CURVE_POINTS = 200

POLICY_COLOURS = ("#2563eb", "#e8590c", "#0f9d76", "#a855f7", "#d6336c", "#5c7cfa", "#8a6d1b")
ACCOUNT_COLOURS = {
    "useful": "#0f9d76",
    "serving": "#54a24b",
    "warm": "#9fd3a5",
    "startup": "#72b7b2",
    "checkpoint": "#86a8d1",
    "asleep": "#3b6ea8",
    "straggler": "#eeca3b",
    "recompute": "#e45756",
    "preempted": "#ff9da6",
    "idle": "#b279a2",
    "free": "#d9dee7",
    "fragmented": "#f58518",
    "reserved": "#c2a83e",
    "closed": "#9d755d",
    "quarantined": "#7a5195",
    "lost": "#6b7280",
}
SIZES = (0, 1, 2, 4, 8, 16, 32, 64)  # upper ends of the classes of GPUs per job

Plot = dict[str, Any]


def page(
    trace: Trace, nodes: Sequence[NodeSpec], outcomes: Sequence[Outcome], rows: Sequence[Summary]
) -> str:
    """The whole document. Plots are plain data for plotly.js, which is put into the page."""
    unit = _time_unit(max(outcome.levels.now_ms for outcome in outcomes))
    in_gpus = outcomes[0].levels.in_gpus
    plots = {
        "utilization": _utilization(outcomes, unit),
        "queue": _queue(outcomes, unit),
        "accounts": _accounts(rows),
        "sizes": _waiting_by_size(outcomes),
        "curves": _completion_curves(outcomes),
    }
    timelines = []
    for number, outcome in enumerate(outcomes):
        plots[f"timeline{number}"] = timeline(outcome, nodes, unit)
        timelines.append(
            f'<h3>{html.escape(outcome.policy)}</h3><div class="plot" id="timeline{number}"></div>'
        )
    return (
        TEMPLATE.replace("@TITLE@", html.escape(trace.name.rpartition("/")[2]))
        .replace("@FACTS@", _facts(trace, nodes))
        .replace("@TABLE@", _table(rows))
        .replace("@COSTS@", _costs(rows))
        .replace("@TIMELINES@", "\n".join(timelines))
        .replace("@UNIT@", "GPU" if in_gpus else "CPU")
        .replace("@DATA@", _script(plots))
        .replace("@PLOTLY@", _plotly())
    )


def _plotly() -> str:
    try:
        return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except (ModuleNotFoundError, OSError) as error:
        raise TraceError("the page needs plotly; install it: pip install 'shoal[sim]'") from error


def _script(plots: dict[str, Plot]) -> str:
    """JSON that cannot end the script element it stands in."""
    return msgspec.json.encode(plots).decode().replace("</", "<\\/")


def _facts(trace: Trace, nodes: Sequence[NodeSpec]) -> str:
    asked = sums(trace)
    gpus = sum(node.gpus for node in nodes)
    facts = (
        f"{asked['jobs']:,} jobs",
        f"over {time_text(asked['span_ms'] / 1000)}",
        f"{asked['gpu_ms'] / 3_600_000:,.0f} GPU-hours of work",
        f"{len(nodes):,} nodes",
        f"{gpus:,} GPUs",
    )
    return "".join(f"<li>{html.escape(fact)}</li>" for fact in facts)


def _table(rows: Sequence[Summary]) -> str:
    head = "".join(
        f'<th><i style="background:{_colour(number)}"></i>{html.escape(row.policy)}</th>'
        for number, row in enumerate(rows)
    )
    body = []
    for figure in FIGURES:
        leaders = best(figure, rows)
        values = [figure.value(row) or 0.0 for row in rows]
        most = max(values) or 1.0
        cells = "".join(
            f'<td class="{"best" if number in leaders else ""}">'
            f"<b>{html.escape(figure.shown(row)) or '-'}</b>"
            f'<s style="width:{100 * values[number] / most:.0f}%;'
            f'background:{_colour(number)}"></s></td>'
            for number, row in enumerate(rows)
        )
        body.append(f"<tr><th>{html.escape(figure.title)}</th>{cells}</tr>")
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _costs(rows: Sequence[Summary]) -> str:
    """What the whole time cost under each policy, and how much of that was work."""
    return "".join(
        f"<p>{html.escape(row.policy)}: {html.escape(line)}</p>"
        for row in rows
        if (line := cost_text(row))
    )


# -- over time ----------------------------------------------------------------------------


def binned(levels: Levels, series: Sequence[int], bins: int = BINS) -> list[float]:
    """The mean level in each of `bins` equal spans of the whole time, exactly weighted."""
    if not levels.now_ms or not len(series):
        return [0.0] * bins
    width = levels.now_ms / bins
    sums_ = [0.0] * bins
    times = levels.times
    for index, level in enumerate(series):
        begin = times[index]
        end = times[index + 1] if index + 1 < len(times) else levels.now_ms
        if not level or end <= begin:
            continue
        first, last = int(begin / width), min(int(end / width), bins - 1)
        for bin_ in range(min(first, bins - 1), last + 1):
            overlap = min(end, (bin_ + 1) * width) - max(begin, bin_ * width)
            sums_[bin_] += level * max(overlap, 0.0)
    return [total / width for total in sums_]


def _utilization(outcomes: Sequence[Outcome], unit: tuple[str, float]) -> Plot:
    lines = []
    for number, outcome in enumerate(outcomes):
        levels = outcome.levels
        held, up = binned(levels, levels.held_over_time), binned(levels, levels.up_over_time)
        shares = [100 * h / u if u else 0 for h, u in zip(held, up, strict=True)]
        lines.append(_line(outcome.policy, number, levels, shares, unit, "%{y:.1f}%"))
    return _plot(lines, unit, "in use, %", range_=[0, 102])


def _queue(outcomes: Sequence[Outcome], unit: tuple[str, float]) -> Plot:
    lines = []
    for number, outcome in enumerate(outcomes):
        levels = outcome.levels
        asked = [level / MILLI for level in binned(levels, levels.waiting_over_time)]
        lines.append(_line(outcome.policy, number, levels, asked, unit, "%{y:,.0f} asked for"))
    return _plot(lines, unit, "asked for")


def _line(
    name: str,
    number: int,
    levels: Levels,
    values: list[float],
    unit: tuple[str, float],
    hover: str,
) -> Plot:
    width = levels.now_ms / BINS / unit[1]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [round((index + 0.5) * width, 4) for index in range(BINS)],
        "y": [round(value, 2) for value in values],
        "line": {"color": _colour(number), "width": 1.8, "shape": "hvh"},
        "hovertemplate": hover,
    }


def _plot(
    data: list[Plot], unit: tuple[str, float], title: str, *, range_: list[int] | None = None
) -> Plot:
    yaxis: Plot = {"title": {"text": title}, "rangemode": "tozero"}
    if range_ is not None:
        yaxis["range"] = range_
    xaxis = {"title": {"text": f"{unit[0]} since the first submission"}}
    return {"data": data, "layout": {"xaxis": xaxis, "yaxis": yaxis, "hovermode": "x unified"}}


# -- policies side by side ----------------------------------------------------------------


def _accounts(rows: Sequence[Summary]) -> Plot:
    found = [{one.account: one for one in row.accounts} for row in rows]
    data = []
    for account, colour in ACCOUNT_COLOURS.items():
        ones = [accounts.get(account) for accounts in found]
        title = next((one.title for one in ones if one is not None), "")
        if title:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": title,
                    "y": [row.policy for row in rows],
                    "x": [round(100 * one.share, 3) if one else 0 for one in ones],
                    "customdata": [
                        account_text(one, row.currency) for one, row in zip(ones, rows, strict=True)
                    ],
                    "marker": {"color": colour},
                    "hovertemplate": "%{x:.2f}%, %{customdata}",
                }
            )
    layout = {
        "barmode": "stack",
        "height": 150 + 46 * len(rows),
        "xaxis": {"title": {"text": "% of all time of all GPUs"}, "range": [0, 100]},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "legend": {"orientation": "h", "y": -0.32 - 0.3 / len(rows), "traceorder": "normal"},
    }
    return {"data": data, "layout": layout}


def _waiting_by_size(outcomes: Sequence[Outcome]) -> Plot:
    used = sorted({_size(amount) for outcome in outcomes for amount in outcome.records.amount})
    data = []
    for number, outcome in enumerate(outcomes):
        classes = _waits_by_size(outcome.records)
        waits = [sorted(classes.get(size, [])) for size in used]
        means = [sum(w) / len(w) / 3_600_000 if w else None for w in waits]
        texts = [
            f"{len(w):,} jobs<br>mean {_ms(sum(w) / max(len(w), 1))}, "
            f"median {_ms(quantile(w, 0.5))}, p99 {_ms(quantile(w, 0.99))}"
            for w in waits
        ]
        data.append(
            {
                "type": "bar",
                "name": outcome.policy,
                "x": [_size_text(size) for size in used],
                "y": means,
                "customdata": texts,
                "marker": {"color": _colour(number)},
                "hovertemplate": "%{customdata}<extra>" + html.escape(outcome.policy) + "</extra>",
            }
        )
    layout = {
        "barmode": "group",
        "bargap": 0.25,
        "xaxis": {"title": {"text": "size of the job"}, "type": "category"},
        "yaxis": {"title": {"text": "mean wait, hours"}, "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout}


def _waits_by_size(records: Records) -> dict[int, list[int]]:
    classes: dict[int, list[int]] = {}
    columns = (records.amount, records.submit_ms, records.placed_ms)
    for amount, submit_ms, placed_ms in zip(*columns, strict=True):
        if placed_ms >= 0:
            classes.setdefault(_size(amount), []).append(placed_ms - submit_ms)
    return classes


def _size(amount: int) -> int:
    """The class of a job: the smallest upper end that holds it, or one beyond all."""
    return next((index for index, end in enumerate(SIZES) if amount <= end * MILLI), len(SIZES))


def _size_text(size: int) -> str:
    if size == len(SIZES):
        return f"> {SIZES[-1]}"
    low, high = (SIZES[size - 1] + 1 if size else 0), SIZES[size]
    return f"{low}-{high}" if low < high else str(high)


def _completion_curves(outcomes: Sequence[Outcome]) -> Plot:
    data = []
    for number, outcome in enumerate(outcomes):
        records = outcome.records
        pairs = zip(records.finished_ms, records.submit_ms, strict=True)
        times = sorted(finished - submitted for finished, submitted in pairs)
        picks = [(len(times) - 1) * step // (CURVE_POINTS - 1) for step in range(CURVE_POINTS)]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": outcome.policy,
                "x": [max(times[pick], 1000) / 3_600_000 for pick in picks],
                "y": [round(100 * (pick + 1) / len(times), 2) for pick in picks],
                "customdata": [_ms(times[pick]) for pick in picks],
                "line": {"color": _colour(number), "width": 2},
                "hovertemplate": "%{y:.1f}% done within %{customdata}",
            }
        )
    layout = {
        "xaxis": {"title": {"text": "completion time, hours"}, "type": "log"},
        "yaxis": {"title": {"text": "% of jobs done within it"}, "range": [0, 102]},
    }
    return {"data": data, "layout": layout}


# -- units and colours ----------------------------------------------------------------------


def _time_unit(span_ms: int) -> tuple[str, float]:
    for name, size_ms in (("days", 86_400_000.0), ("hours", 3_600_000.0), ("minutes", 60_000.0)):
        if span_ms >= 3 * size_ms:
            return name, size_ms
    return "seconds", 1000.0


def _colour(number: int) -> str:
    return POLICY_COLOURS[number % len(POLICY_COLOURS)]


def _ms(ms: float) -> str:
    return time_text(ms / 1000)
