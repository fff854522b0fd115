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
from shoal.sim.replay.traces import Trace, TraceError, sums

BINS = 400  # points of a line over time
CURVE_POINTS = 200

POLICY_COLORS = ("#2563eb", "#e8590c", "#0f9d76", "#a855f7", "#d6336c", "#5c7cfa", "#8a6d1b")
ACCOUNT_COLORS = {
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
        f'<th><i style="background:{_color(number)}"></i>{html.escape(row.policy)}</th>'
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
            f'background:{_color(number)}"></s></td>'
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
        "line": {"color": _color(number), "width": 1.8, "shape": "hvh"},
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
    for account, color in ACCOUNT_COLORS.items():
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
                    "marker": {"color": color},
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
                "marker": {"color": _color(number)},
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
                "line": {"color": _color(number), "width": 2},
                "hovertemplate": "%{y:.1f}% done within %{customdata}",
            }
        )
    layout = {
        "xaxis": {"title": {"text": "completion time, hours"}, "type": "log"},
        "yaxis": {"title": {"text": "% of jobs done within it"}, "range": [0, 102]},
    }
    return {"data": data, "layout": layout}


# -- units and colors ----------------------------------------------------------------------


def _time_unit(span_ms: int) -> tuple[str, float]:
    for name, size_ms in (("days", 86_400_000.0), ("hours", 3_600_000.0), ("minutes", 60_000.0)):
        if span_ms >= 3 * size_ms:
            return name, size_ms
    return "seconds", 1000.0


def _color(number: int) -> str:
    return POLICY_COLORS[number % len(POLICY_COLORS)]


def _ms(ms: float) -> str:
    return time_text(ms / 1000)


# The frame of the report: HTML, its style, and the few lines that draw the plots.


TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Replay of @TITLE@</title>
<style>
  :root { --ink: #18212f; --soft: #5b6676; --rule: #e4e8ef; --back: #f5f7fa; }
  * { box-sizing: border-box; }
  body { margin: 0; background: var(--back); color: var(--ink);
         font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
  main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 60px; }
  h1 { font-size: 26px; margin: 0 0 6px; letter-spacing: -0.01em; }
  h2 { font-size: 17px; margin: 0 0 2px; }
  .plot + h2 { margin-top: 20px; }
  h3 { font-size: 14px; margin: 18px 0 0; color: var(--soft); font-weight: 600; }
  p { margin: 0 0 8px; color: var(--soft); max-width: 78ch; }
  ul.facts { list-style: none; padding: 0; margin: 0 0 22px; color: var(--soft); }
  ul.facts li { display: inline; }
  ul.facts li + li::before { content: "·"; margin: 0 9px; }
  section { background: #fff; border: 1px solid var(--rule); border-radius: 10px;
            padding: 20px 22px; margin-bottom: 18px; }
  .pair { display: grid; grid-template-columns: 1fr 1fr; gap: 18px; }
  .pair section { min-width: 0; }
  @media (max-width: 860px) { .pair { grid-template-columns: 1fr; gap: 0; } }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  thead th { text-align: right; font-weight: 600; padding: 4px 14px 8px; white-space: nowrap; }
  thead i { display: inline-block; width: 10px; height: 10px; border-radius: 3px;
            margin-right: 7px; }
  tbody th { text-align: left; font-weight: 400; color: var(--soft); white-space: nowrap;
             padding: 5px 14px 5px 0; }
  td { text-align: right; padding: 5px 14px; min-width: 116px; }
  tbody tr { border-top: 1px solid var(--rule); }
  td b { font-weight: 500; }
  td.best b { font-weight: 700; color: #0b7a5b; }
  td s { display: block; height: 3px; border-radius: 2px; margin: 2px 0 0 auto; opacity: .38; }
  .plot { width: 100%; }
  footer { color: var(--soft); font-size: 13px; }
</style>
</head>
<body>
<main>
<h1>Replay of @TITLE@</h1>
<ul class="facts">@FACTS@</ul>
<section>
  <h2>Policies side by side</h2>
  <p>The best of each line is green. Times are of jobs, shares are of the cluster.</p>
  <div class="scroll">@TABLE@</div>
</section>
<section>
  <h2>Utilization over time</h2>
  <p>Share of the working @UNIT@s that jobs held.</p>
  <div class="plot" id="utilization"></div>
  <h2>Queue over time</h2>
  <p>@UNIT@s that waiting jobs asked for.</p>
  <div class="plot" id="queue"></div>
</section>
<div class="pair">
<section>
  <h2>Waiting by size</h2>
  <p>From submission to the first placement, by @UNIT@s of the job.</p>
  <div class="plot" id="sizes"></div>
</section>
<section>
  <h2>Completion</h2>
  <p>From submission to the end: further left is better.</p>
  <div class="plot" id="curves"></div>
</section>
</div>
<section>
  <h2>Where the GPU time went</h2>
  <p>All of it, from the first submission to the last end, by the ledger's accounts.</p>
  @COSTS@
  <div class="plot" id="accounts"></div>
</section>
<section>
  <h2>Cluster timeline</h2>
  <p>Each row is a @UNIT@, each color a job. A large cluster shows some of its nodes.</p>
  @TIMELINES@
</section>
<footer>Made by <code>shoal sim</code>.</footer>
</main>
<script>@PLOTLY@</script>
<script>
const plots = @DATA@;
const grid = { gridcolor: "#e9edf3", zerolinecolor: "#d5dbe5", linecolor: "#d5dbe5" };
for (const [id, plot] of Object.entries(plots)) {
  const own = plot.layout;
  const layout = Object.assign({
    height: 320, margin: { l: 62, r: 14, t: 12, b: 48 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", size: 12.5,
            color: "#39434f" },
    legend: { orientation: "h", y: 1.12, x: 0 }, hoverlabel: { align: "left" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: "#b6bfcc", activecolor: "#5b6676",
               remove: ["lasso2d", "select2d"] },
  }, own, {
    xaxis: Object.assign({}, grid, own.xaxis), yaxis: Object.assign({}, grid, own.yaxis),
  });
  Plotly.newPlot(id, plot.data, layout, { responsive: true, displaylogo: false });
}
</script>
</body>
</html>
"""


# The cluster timeline of the report: which job held which GPU, and when.


RECTANGLES_MAX = 5_000  # more would only be slow to draw
ROWS_MAX = 64  # GPUs
JOB_COLORS = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b",
    "#b279a2", "#ff9da6", "#9d755d", "#86a8d1", "#c2a83e", "#7a9e7e",
)  # fmt: skip


def timeline(
    outcome: Outcome, nodes: Sequence[NodeSpec], unit: tuple[str, float]
) -> dict[str, Any]:
    """GPUs from top to bottom, time from left to right, a color for each job."""
    shown, offsets, height = _sampled(nodes)
    segments = outcome.segments
    picked = [index for index, node in enumerate(segments.node) if node in offsets]
    # Only the longest are visible at all.
    picked.sort(key=lambda index: segments.begin_ms[index] - segments.end_ms[index])
    bars: dict[int, dict[str, list[Any]]] = {}
    for index in picked[:RECTANGLES_MAX]:
        begin_ms, end_ms = segments.begin_ms[index], segments.end_ms[index]
        row, node = segments.row[index], segments.node[index]
        bar = bars.setdefault(
            row % len(JOB_COLORS), {"x": [], "base": [], "y": [], "w": [], "t": []}
        )
        for first, count in _runs(segments.mask[index] or not outcome.levels.in_gpus):
            bar["base"].append(round(begin_ms / unit[1], 4))
            bar["x"].append(round((end_ms - begin_ms) / unit[1], 4))
            bar["y"].append(offsets[node] + first + count / 2 - 0.5)
            bar["w"].append(count * 0.94)
            bar["t"].append(
                f"job in row {row} on {nodes[node].id}, {time_text((end_ms - begin_ms) / 1000)}"
            )
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": bar["x"],
            "base": bar["base"],
            "y": bar["y"],
            "width": bar["w"],
            "text": bar["t"],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": JOB_COLORS[color], "line": {"width": 0}},
            "showlegend": False,
        }
        for color, bar in sorted(bars.items())
    ]
    ticks = [offsets[node] + max(nodes[node].gpus, 1) / 2 - 0.5 for node in shown]
    layout = {
        "barmode": "overlay",
        "height": 110 + 7 * max(height, 24),
        "xaxis": {
            "title": {"text": f"{unit[0]} since the first submission"},
            "range": [0, outcome.levels.now_ms / unit[1]],
        },
        "yaxis": {
            "tickvals": ticks,
            "ticktext": [nodes[node].id for node in shown],
            "range": [height - 0.5, -0.5],
            "automargin": True,
            "showgrid": False,
        },
    }
    return {"data": data, "layout": layout}


def _sampled(nodes: Sequence[NodeSpec]) -> tuple[list[int], dict[int, int], int]:
    """Nodes evenly over the cluster, as many as have room; where each begins; rows in all."""
    gpus = max((node.gpus for node in nodes), default=0) or 1
    count = min(len(nodes), max(ROWS_MAX // gpus, 1))
    shown = [index * len(nodes) // count for index in range(count)]
    offsets, height = {}, 0
    for index in shown:
        offsets[index] = height
        height += max(nodes[index].gpus, 1) + 1  # and a gap between two nodes
    return shown, offsets, max(height - 1, 1)


def _runs(mask: int) -> list[tuple[int, int]]:
    """Neighboring bits together: 0b1011 is [(0, 2), (3, 1)]."""
    runs, first = [], 0
    while mask:
        first += (skipped := (mask & -mask).bit_length() - 1)
        mask >>= skipped
        count = ((mask + 1) & -(mask + 1)).bit_length() - 1
        runs.append((first, count))
        first += count
        mask >>= count
    return runs
