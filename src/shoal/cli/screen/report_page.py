"""The ledger as one page of HTML: no script, nothing from another host, light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from shoal.cli.verbs.report import KeySum, by_key, gpu_hours, key_text, moment_text, percents
from shoal.model.ledger import By, LedgerView

ROWS_MAX = 60
COLORS = {
    "useful": "#1b9e77",
    "serving": "#66c2a4",
    "warm": "#b2dfd0",
    "startup": "#4a90d9",
    "checkpoint": "#7fb3e6",
    "straggler": "#a9cdf0",
    "recompute": "#d7432f",
    "preempted": "#ee7f5b",
    "idle": "#f3a98d",
    "free": "#aeb6c2",
    "fragmented": "#e9b44c",
    "reserved": "#f2d28b",
    "closed": "#b39ddb",
    "quarantined": "#8e6bbf",
    "lost": "#5b4b8a",
}
TITLES = {
    By.TENANT: "By tenant",
    By.USER: "By user",
    By.JOB: "By job",
    By.NODE: "By node",
}
CHART_WIDTH, CHART_HEIGHT = 1080, 220

STYLE = """
:root { --ink: #18212f; --soft: #5b6676; --rule: #e4e8ef; --back: #f5f7fa; --card: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e7ebf1; --soft: #9aa6b6; --rule: #2c3542; --back: #12161c; --card: #1a2029; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 17px; margin: 0 0 10px; }
p { color: var(--soft); margin: 0 0 16px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 18px 20px; margin-bottom: 16px; overflow-x: auto; }
.facts { display: flex; flex-wrap: wrap; gap: 12px; margin: 16px 0; }
.facts div { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 10px 18px; } .facts b { display: block; font-size: 21px; }
.facts span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); padding: 3px 12px 6px;
  white-space: nowrap; font-size: 13px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td { text-align: right; padding: 5px 12px; border-top: 1px solid var(--rule);
  white-space: nowrap; }
tr.all td { font-weight: 700; }
td.bar { width: 34%; min-width: 170px; text-align: left; }
.stack { display: flex; height: 12px; border-radius: 4px; overflow: hidden; }
.stack i { display: block; height: 100%; }
i.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 11px; }
.note { color: var(--soft); font-size: 14px; }
"""


def page(views: Mapping[By, LedgerView]) -> str:
    whole = views[By.ACCOUNT]
    title = f"GPU time from {moment_text(max(whole.from_ms, whole.began_ms))} UTC"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">",
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>",
        f"<h1>Where the GPU time went</h1><p>{escape(title[9:])} to "
        f"{moment_text(whole.to_ms)} UTC, {whole.gpus} GPUs</p>",
        _facts(whole),
    ]
    if whole.capacity_gpu_us:
        parts += [_accounts(whole), _days(views[By.DAY])]
        parts += [_keys(views[by], heading) for by, heading in TITLES.items()]
    notes = "".join(f"<li>{escape(note)}</li>" for note in whole.notes)
    if notes:
        parts.append(f'<section class="note"><h2>To know</h2><ul>{notes}</ul></section>')
    parts.append(
        "<p>Every millisecond of every GPU is in exactly one account. "
        "Made by <code>shoal report</code>.</p></main></body></html>"
    )
    return "\n".join(parts) + "\n"


def _facts(view: LedgerView) -> str:
    used = sum(one.gpu_us for one in view.accounts if one.group == "used")
    share = f"{100 * used / view.capacity_gpu_us:.1f} %" if view.capacity_gpu_us else "-"
    facts = [(gpu_hours(view.capacity_gpu_us), "GPU-hours there were"), (share, "used")]
    if view.cost is not None and view.currency:
        facts.append((f"{view.cost:,.2f} {view.currency}", "what they cost"))
    if view.energy_wh is not None:
        facts.append((f"{view.energy_wh / 1000:,.1f} kWh", "energy, estimated"))
    if view.co2_g is not None:
        facts.append((f"{view.co2_g / 1000:,.1f} kg", "CO2"))
    boxes = "".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in facts)
    return f'<div class="facts">{boxes}</div>'


def _accounts(view: LedgerView) -> str:
    shares = percents([one.gpu_us for one in view.accounts])
    rows = []
    for one, share in zip(view.accounts, shares, strict=True):
        color = COLORS.get(one.account, "#999")
        part = 100 * one.gpu_us / view.capacity_gpu_us
        bar = f'<div class="stack"><i style="width:{part:.3f}%;background:{color}"></i></div>'
        rows.append(
            f'<tr><td><i class="key" style="background:{color}"></i>{escape(one.title)}</td>'
            f"<td>{gpu_hours(one.gpu_us)}</td><td>{share}</td>{_money(view, one)}"
            f'<td class="bar">{bar}</td></tr>'
        )
    rows.append(
        f'<tr class="all"><td>all</td><td>{gpu_hours(view.capacity_gpu_us)}</td>'
        f"<td>100.0%</td>{_money(view, view)}<td></td></tr>"
    )
    head = f"<tr><th>account</th><th>GPU-hours</th><th>share</th>{_heads(view)}<th></th></tr>"
    return f"<section><h2>Accounts</h2><table>{head}{''.join(rows)}</table></section>"


def _days(view: LedgerView) -> str:
    """Stacked over time; what rows there are (old days are whole days) share the width."""
    sums = by_key(view)
    if len(sums) < 2:
        return ""
    most = max(one.gpu_us for one in sums)
    step = CHART_WIDTH / len(sums)
    shapes = []
    for number, one in enumerate(sums):
        y = float(CHART_HEIGHT)
        for account in COLORS:
            amount = one.accounts.get(account, 0)
            if amount:
                height = CHART_HEIGHT * amount / most
                y -= height
                shapes.append(
                    f'<rect x="{number * step:.2f}" y="{y:.2f}" width="{max(step - 1, 0.6):.2f}" '
                    f'height="{height:.2f}" fill="{COLORS[account]}"><title>'
                    f"{key_text(view, one.key)}: {account} {gpu_hours(amount)} GPU-hours"
                    "</title></rect>"
                )
    first, last = key_text(view, sums[0].key), key_text(view, sums[-1].key)
    return (
        f'<section><h2>By day</h2><svg viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT + 20}" '
        f'role="img" aria-label="GPU time by day">{"".join(shapes)}'
        f'<text x="0" y="{CHART_HEIGHT + 15}">{first}</text><text x="{CHART_WIDTH}" '
        f'y="{CHART_HEIGHT + 15}" text-anchor="end">{last}</text></svg></section>'
    )


def _keys(view: LedgerView, heading: str) -> str:
    sums = by_key(view)
    shares = percents([one.gpu_us for one in sums])
    rows = []
    for one, share in list(zip(sums, shares, strict=True))[:ROWS_MAX]:
        name = key_text(view, one.key) + (f" {one.label}" if one.label else "")
        rows.append(
            f"<tr><td>{escape(name)}</td><td>{gpu_hours(one.gpu_us)}</td><td>{share}</td>"
            f'{_money(view, one)}<td class="bar">{_stack(one)}</td></tr>'
        )
    if len(sums) > ROWS_MAX:
        rows.append(f"<tr><td>and {len(sums) - ROWS_MAX} more</td></tr>")
    head = f"<tr><th>{view.by}</th><th>GPU-hours</th><th>share</th>{_heads(view)}<th></th></tr>"
    return f"<section><h2>{heading}</h2><table>{head}{''.join(rows)}</table></section>"


def _stack(one: KeySum) -> str:
    parts = []
    for account, color in COLORS.items():
        amount = one.accounts.get(account, 0)
        if amount:
            width = 100 * amount / one.gpu_us
            parts.append(
                f'<i style="width:{width:.3f}%;background:{color}" title="{account} {width:.1f}%">'
                "</i>"
            )
    return f'<div class="stack">{"".join(parts)}</div>'


def _heads(view: LedgerView) -> str:
    heads = [view.currency] if view.currency else []
    if any(one.energy_wh is not None for one in view.accounts):
        heads.append("kWh")
    if any(one.co2_g is not None for one in view.accounts):
        heads.append("kg CO2")
    return "".join(f"<th>{escape(head)}</th>" for head in heads)


def _money(view: LedgerView, one: object) -> str:
    cells = []
    if view.currency:
        cells.append(_cell(getattr(one, "cost", None), 1))
    if any(each.energy_wh is not None for each in view.accounts):
        cells.append(_cell(getattr(one, "energy_wh", None), 1000))
    if any(each.co2_g is not None for each in view.accounts):
        cells.append(_cell(getattr(one, "co2_g", None), 1000))
    return "".join(cells)


def _cell(value: float | None, divisor: int) -> str:
    return "<td>?</td>" if value is None else f"<td>{value / divisor:,.2f}</td>"
