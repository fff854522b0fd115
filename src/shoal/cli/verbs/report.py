"""`shoal report`: where GPU time and money went, on a terminal or as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Option, verb
from shoal.forms.failure import USAGE, Failure

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell, Column
    from shoal.model.ledger import AccountSum, LedgerView

BY = ("account", "tenant", "user", "job", "node", "day", "hour")
GROUPS = ("used", "overhead", "wasted", "unused", "away")
GROUP_STYLES = {
    "used": "green",
    "overhead": "cyan",
    "wasted": "red",
    "unused": "yellow",
    "away": "magenta",
}
BAR_WIDTH = 40
BAR_WIDTH_MIN = 8
NARROW = 110  # a terminal with fewer columns has no room for energy beside money
KEYS_SHOWN = 40


@verb(
    Option("since", "--from", metavar="WHEN", default="30d", help="A date, or how long ago. [30d]"),
    Option("until", "--to", metavar="WHEN", default="now", help="A date, or how long ago. [now]"),
    Option("--by", metavar="KEY", default="account", help=f"One of {', '.join(BY)}. [account]"),
    Option("--csv", metavar="FILE", type=Path, help="Write the rows to a CSV file."),
)
def report(since: str, until: str, by: str, csv: Path | None, json: bool, home: Path) -> None:
    """Show where GPU time and money went.

    Every millisecond of every GPU is in exactly one account, so the lines add
    up to 100.0 % of the cluster's capacity. Times are UTC, in whole hours.
    Write dates as 2026-11-01. Money needs a price list: see `shoal prices`.
    docs/ledger.md explains each account. `shoal page` shows the same in a
    browser.

    Examples:
      shoal report
      shoal report --by tenant --from 2026-11-01 --to 2026-12-01
      shoal report --by job --from 24h
      shoal report --by day --csv november.csv
    """
    from shoal.cli import cluster
    from shoal.cli.screen import show
    from shoal.forms import units
    from shoal.model.ledger import By

    if by not in BY:
        raise Failure(f"--by: must be one of {', '.join(BY)}, not {units.quoted(by)}", USAGE)
    with cluster.connect(home) as client:
        now_ms = client.status().now_ms
        from_ms, to_ms = moment_ms("--from", since, now_ms), moment_ms("--to", until, now_ms)
        if to_ms <= from_ms:
            raise Failure(f"--to: {units.quoted(until)} is not after --from {since}", USAGE)
        view = client.ledger(by=By(by), from_ms=from_ms, to_ms=to_ms)
    if csv is not None:
        _write_csv(csv, view)
    if json:
        show.as_json(view)
    elif csv is None:
        _print(view)
    else:
        show.line(f"wrote {csv}", "green")


def moment_ms(flag: str, text: str, now_ms: int) -> int:
    """A date or time in UTC, or a duration before now."""
    from datetime import UTC, datetime

    from shoal.forms import units

    word = text.strip()
    if word == "now":
        return now_ms
    try:
        when = datetime.fromisoformat(word)
    except ValueError:
        try:
            return max(0, now_ms - units.duration_ms(word))
        except units.BadAmount:
            fix = "write a date as 2026-11-01 or 2026-11-01T08:00, or how long ago as 7d or 12h"
            raise Failure(f"{flag}: {units.quoted(text)} is not a time; {fix}", USAGE) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    ms = int(when.timestamp() * 1000)
    if not 0 <= ms <= 2**52:
        raise Failure(f"{flag}: {units.quoted(text)} is out of range", USAGE)
    return ms


# -- on a terminal --------------------------------------------------------------------------


def _print(view: LedgerView) -> None:
    from shoal.cli.screen import show
    from shoal.forms.units import duration_text

    began, ended = moment_text(view.from_ms), moment_text(view.to_ms)
    if view.from_ms < view.began_ms < view.to_ms:
        began = f"{moment_text(view.began_ms)} (start of the ledger)"
    hours = gpu_hours(view.capacity_gpu_us)
    show.line(f"{began} to {ended} UTC: {hours} GPU-hours of {view.gpus} GPUs", "bold")
    if view.capacity_gpu_us:
        show.line("")
        if view.by == "account":
            _print_accounts(view)
        else:
            _print_keys(view)
        if view.slept_ms:
            slept, lent = duration_text(view.slept_ms), gpu_hours(view.lent_gpu_us)
            told = f"jobs slept {slept} in all, and lent out {lent} GPU-hours by that"
            show.line(f"memo, not part of the sum: {told}", "dim")
    for note in view.notes:
        show.note(f"note: {note}")


def _print_accounts(view: LedgerView) -> None:
    from shoal.cli.screen.show import Cell, Column, at_terminal, bar, table

    columns = [Column("ACCOUNT"), Column("GPU-HOURS", right=True), Column("SHARE", right=True)]
    columns += _money_columns(view)
    width = min(BAR_WIDTH, _columns() - 52 - 10 * len(_money_columns(view)))
    drawn = at_terminal() and width >= BAR_WIDTH_MIN
    if drawn:
        columns.append(Column(""))
    shares = percents([one.gpu_us for one in view.accounts])
    rows: list[list[str | Cell]] = []
    for one, share in zip(view.accounts, shares, strict=True):
        style = GROUP_STYLES.get(one.group, "")
        row = [Cell(one.title, style), gpu_hours(one.gpu_us), share, *_money(view, one)]
        if drawn:
            row.append(Cell("", style, bar(one.gpu_us, view.capacity_gpu_us, width)))
        rows.append(row)
    rows.append(_total(view))
    if drawn:
        rows[-1].append(Cell(" ", "", " "))
    table(columns, rows)


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _print_keys(view: LedgerView) -> None:
    from shoal.cli.screen.show import Cell, Column, line, table

    sums = by_key(view)
    titles = [view.by.upper(), *(["NAME"] if view.by == "job" else [])]
    columns = [Column(title, flexible=title == titles[-1]) for title in titles]
    columns += [Column("GPU-HOURS", right=True), Column("SHARE", right=True)]
    columns += [Column(group.upper(), right=True) for group in GROUPS]
    columns += _money_columns(view)
    shares = percents([one.gpu_us for one in sums])
    groups = {one.account: one.group for one in view.accounts}
    rows: list[list[str | Cell]] = []
    shown = sums if len(sums) <= KEYS_SHOWN else sums[:KEYS_SHOWN]
    for one, share in zip(shown, shares, strict=False):
        parts = dict.fromkeys(GROUPS, 0)
        for account, amount in one.accounts.items():
            parts[groups[account]] += amount
        cells: list[str | Cell] = [Cell(key_text(view, one.key), "bold")]
        if view.by == "job":
            cells.append(one.label)
        cells += [gpu_hours(one.gpu_us), share]
        cells += [
            Cell(
                f"{100 * parts[group] / one.gpu_us:.0f}%" if parts[group] else "",
                GROUP_STYLES[group],
            )
            for group in GROUPS
        ]
        rows.append([*cells, *_money(view, one)])
    total = _total(view)
    empty: list[str | Cell] = [""] * len(GROUPS)
    named: list[str | Cell] = [""] if view.by == "job" else []
    rows.append([total[0], *named, *total[1:3], *empty, *total[3:]])
    table(columns, rows)
    if len(sums) > len(shown):
        line(f"... and {len(sums) - len(shown)} more; --csv and --json list all", "dim")


def _money_columns(view: LedgerView) -> list[Column]:
    from shoal.cli.screen.show import Column

    columns = []
    if view.currency:
        columns.append(Column(view.currency, right=True))
    if _shows_energy(view):
        columns.append(Column("KWH", right=True))
        if any(one.co2_g is not None for one in view.accounts):
            columns.append(Column("KG CO2", right=True))
    return columns


def _money(view: LedgerView, one: AccountSum | KeySum | LedgerView) -> list[str | Cell]:
    cells: list[str | Cell] = []
    if view.currency:
        cells.append("?" if one.cost is None else f"{one.cost:,.2f}")
    if _shows_energy(view):
        cells.append("?" if one.energy_wh is None else f"{one.energy_wh / 1000:,.2f}")
        if any(each.co2_g is not None for each in view.accounts):
            cells.append("?" if one.co2_g is None else f"{one.co2_g / 1000:,.2f}")
    return cells


def _shows_energy(view: LedgerView) -> bool:
    from shoal.cli.screen.show import at_terminal

    narrow = at_terminal() and _columns() < NARROW and view.currency and view.by != "account"
    return not narrow and any(one.energy_wh is not None for one in view.accounts)


def _total(view: LedgerView) -> list[str | Cell]:
    from shoal.cli.screen.show import Cell

    money = [Cell(str(cell), "bold") for cell in _money(view, view)]
    hours = gpu_hours(view.capacity_gpu_us)
    return [Cell("all", "bold"), Cell(hours, "bold"), Cell("100.0%", "bold"), *money]


class KeySum:
    """One key of a view, over all accounts."""

    def __init__(self, key: str, label: str) -> None:
        self.key, self.label = key, label
        self.gpu_us = 0
        self.accounts: dict[str, int] = {}
        self.cost: float | None = 0.0
        self.energy_wh: float | None = 0.0
        self.co2_g: float | None = 0.0


def by_key(view: LedgerView) -> list[KeySum]:
    sums: dict[str, KeySum] = {}
    for row in view.rows:
        one = sums.setdefault(row.key, KeySum(row.key, row.label))
        one.gpu_us += row.gpu_us
        one.accounts[row.account] = one.accounts.get(row.account, 0) + row.gpu_us
        one.cost = _plus(one.cost, row.cost)
        one.energy_wh = _plus(one.energy_wh, row.energy_wh)
        one.co2_g = _plus(one.co2_g, row.co2_g)
    return list(sums.values())


def _plus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def key_text(view: LedgerView, key: str) -> str:
    if view.by in ("day", "hour"):
        return moment_text(int(key))[: 10 if view.by == "day" else 16]
    return key or "(none)"


def percents(amounts: list[int]) -> list[str]:
    """Percentages that add up to 100.0: the rounding error goes to the largest remainders."""
    total = sum(amounts)
    if not total:
        return ["0.0%"] * len(amounts)
    tenths = [1000 * amount // total for amount in amounts]
    cut = sorted(range(len(amounts)), key=lambda i: -(1000 * amounts[i] % total))
    for index in cut[: 1000 - sum(tenths)]:
        tenths[index] += 1
    return [f"{tenth // 10}.{tenth % 10}%" for tenth in tenths]


def gpu_hours(gpu_us: int) -> str:
    hours = gpu_us / 3_600_000_000
    return f"{hours:,.1f}" if hours >= 100 else f"{hours:,.2f}" if hours >= 1 else f"{hours:.4f}"


def moment_text(at_ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


# -- files ----------------------------------------------------------------------------------


def _write_csv(path: Path, view: LedgerView) -> None:
    from shoal.forms import ledger_csv

    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            ledger_csv.write(file, view)
    except OSError as error:
        raise Failure(f"--csv: {path}: {error.strerror or error}") from None
