"""`shoal report` and `shoal import`: where GPU time and money went, here or at a Slurm site."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, flag, number, verb
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.cli.screen.show import Cell, Column
    from shoal.model.ledger import AccountSum, LedgerView, TokenCost, TokenRow
    from shoal.sim.accounting import Accounts, Sum


NEIGHBOR = "neighbor"  # what is owed to them: no part of what our own nodes had
BY = ("account", "tenant", "user", "job", "node", "service", "day", "hour", NEIGHBOR)
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
TOKENS = ("REQUESTS", "PROMPT", "CACHED", "GENERATED")


@verb(
    Option("since", "--from", metavar="WHEN", default="30d", help="A date, or how long ago. [30d]"),
    Option("until", "--to", metavar="WHEN", default="now", help="A date, or how long ago. [now]"),
    Option("--by", metavar="KEY", default="account", help=f"One of {', '.join(BY)}. [account]"),
    flag("--tokens", help="Who used tokens of which service, and their cost."),
    Option("--csv", metavar="FILE", type=Path, help="Write the rows to a CSV file."),
)
def report(
    since: str, until: str, by: str, tokens: bool, csv: Path | None, json: bool, home: Path
) -> None:
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
      shoal report --tokens --from 7d
      shoal report --by neighbor
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
        key = By.ACCOUNT if by == NEIGHBOR else By(by)
        view = client.ledger(by=key, from_ms=from_ms, to_ms=to_ms)
    if csv is not None:
        _write_csv(csv, view, "tokens" if tokens else "owed" if by == NEIGHBOR else "")
    if json:
        show.as_json(view)
    elif csv is None:
        if not tokens and by != NEIGHBOR:
            _print(view)
        else:
            _print_tokens(view) if tokens else _print_owed(view)
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
        show.line(view.verdict, "bold")
        show.line("")
        if view.by == "account":
            _print_accounts(view)
        else:
            _print_keys(view)
        if view.slept_ms:
            slept, lent = duration_text(view.slept_ms), gpu_hours(view.lent_gpu_us)
            told = f"jobs slept {slept} in all, and lent out {lent} GPU-hours by that"
            show.line(f"memo, not part of the sum: {told}", "dim")
    if view.token_costs:
        show.line("")
        _print_costs(view)
    if view.owed:
        show.line("")
        _print_owed(view)
    for note in view.notes:
        show.note(f"note: {note}")


def _print_owed(view: LedgerView) -> None:
    """What neighbors have run for us, each in its own currency."""
    from shoal.cli.screen import show
    from shoal.cli.screen.show import Column, table

    if not view.owed:
        show.line("no neighbor has run a job of ours to its end in this time")
        return
    columns = [Column("OWED TO"), Column("TENANT", flexible=True)]
    columns += [Column(title, right=True) for title in ("JOBS", "GPU-HOURS", "COST")]
    rows: list[list[str | Cell]] = []
    for one in view.owed[:KEYS_SHOWN]:
        cost = f"{one.cost:,.2f}" if one.cost else ""
        rows.append([one.neighbor, one.tenant, str(one.jobs), gpu_hours(one.gpu_ms * 1000), cost])
    table(columns, rows)
    if len(view.owed) > KEYS_SHOWN:
        more = len(view.owed) - KEYS_SHOWN
        show.line(f"... and {more} more; --csv and --json list all", "dim")


def _print_tokens(view: LedgerView) -> None:
    from shoal.cli.screen import show
    from shoal.cli.screen.show import Column, table

    if not view.tokens:
        show.line("no tokens were counted in this time; services of --route cache count them")
        return
    _print_costs(view)
    show.line("")
    timed = view.by in ("day", "hour")
    titles = [view.by.upper(), "SERVICE"] if timed else ["SERVICE", "KEY", "TENANT"]
    columns = [Column(title, flexible=title == "KEY") for title in titles]
    rows: list[list[str | Cell]] = []
    for one in view.tokens[:KEYS_SHOWN]:
        named = [key_text(view, one.key), one.service] if timed else _caller(one)
        rows.append([*named, *(f"{amount:,}" for amount in _amounts(one))])
    table([*columns, *(Column(title, right=True) for title in TOKENS)], rows)
    if len(view.tokens) > KEYS_SHOWN:
        more = len(view.tokens) - KEYS_SHOWN
        show.line(f"... and {more} more; --csv and --json list all", "dim")


def _print_costs(view: LedgerView) -> None:
    """The whole cost of a service's replicas, divided in two ways."""
    from shoal.cli.screen.show import Column, table

    million = [f"{view.currency}/1M {what}" for what in ("GENERATED", "COMPUTED")]
    titles = [*TOKENS, "GPU-HOURS", *([view.currency, *million] if view.currency else [])]
    rows: list[list[str | Cell]] = []
    for one in view.token_costs:
        row = [one.service, *(f"{amount:,}" for amount in _amounts(one)), gpu_hours(one.gpu_us)]
        if view.currency:
            each = one.cost, one.per_million_generated, one.per_million_computed
            row += ["?" if cost is None else f"{cost:,.{2 if cost >= 1 else 4}f}" for cost in each]
        rows.append([*row])
    table([Column("SERVICE"), *(Column(title, right=True) for title in titles)], rows)


def _amounts(one: TokenRow | TokenCost) -> tuple[int, ...]:
    return one.requests, one.prompt, one.cached, one.generated


def _caller(one: TokenRow) -> list[str]:
    return [one.service, one.caller or "without a key", one.tenant]


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
    return key or ("No service" if view.by == "service" else "Unallocated")


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


def _write_csv(path: Path, view: LedgerView, what: str) -> None:
    from shoal.forms import ledger_csv

    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            ledger_csv.WRITERS[what](file, view)
    except OSError as error:
        raise Failure(f"--csv: {path}: {error.strerror or error}") from None


# `shoal import`: read what another system has recorded, and change nothing.


SHOWN = 20  # accounts and users
SINCE = "30d"
SACCT_TIMEOUT_S = 600.0
STDIN = "-"


@verb(
    Argument("source", "sacct", "Slurm's accounting; no other is supported yet."),
    Argument("file", "[FILE]", "What sacct printed, or - . [run sacct]", required=False),
    Option("since", "--from", metavar="WHEN", default=SINCE, help=f"How far back. [{SINCE}]"),
    Option("--gpus", metavar="N", type=number(1), help="GPUs of the site. [as sinfo says]"),
    Option("--trace", metavar="FILE", type=Path, help="Write the jobs, for `shoal sim`."),
    home=False,
)
def import_(
    source: str, file: str | None, since: str, gpus: int | None, trace: Path | None, json: bool
) -> None:
    """Show where a Slurm site's GPU time went.

    Nothing is changed, and no cluster of Shoal's is needed. Without FILE this
    runs sacct, which must be in PATH. With --trace it also writes the jobs to
    a file that `shoal sim` replays under other policies.

    Examples:
      shoal import sacct
      shoal import sacct --from 2026-01-01 --trace jobs.txt
      shoal sim jobs.txt --nodes 16 --gpus 8 --policy fifo --policy fair
      sacct -aPXD -o JobID,User,Submit,Start,ElapsedRaw,AllocTRES,State > all.txt
      shoal import sacct all.txt --gpus 128 --json | jq .outcomes
    """
    from shoal.cli.screen import show
    from shoal.sim.accounting import account, gpus_of_nodes, idle_s
    from shoal.sim.replay.readers.rows import Rows
    from shoal.sim.replay.traces import TraceError

    if source != "sacct":
        raise Failure(
            f"unknown command 'shoal import {source[:40]}': use shoal import sacct", USAGE
        )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = _input(file, since, Path(folder))
        try:
            found = account(Rows(path))
            if trace is not None:
                _write_trace(path, trace)
        except TraceError as error:
            raise Failure(str(error).removeprefix(f"{folder}/"), REFUSED) from error
    if file is None and gpus is None:
        gpus = gpus_of_nodes(_sinfo()) or None
    idle = idle_s(found, gpus) if gpus and found.unit == "GPU" else None
    if json:
        show.as_json(_document(found, idle))
        return
    _print_site(found, gpus, idle)
    if trace is not None:
        show.note(f"wrote {trace}: shoal sim {trace} --nodes N --gpus G --policy fair")


def _input(file: str | None, since: str, folder: Path) -> Path:
    import subprocess
    import sys
    import time

    from shoal.sim.accounting import ARGV, COLUMNS

    if file is not None and file != STDIN:
        return Path(file)
    path = folder / ("standard input" if file else "sacct")
    if file == STDIN:
        path.write_bytes(sys.stdin.buffer.read())
        return path
    began_s = moment_ms("--from", since, time.time_ns() // 1_000_000) // 1000
    begun = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(began_s))
    argv = [*ARGV, f"--format={COLUMNS}", f"--starttime={begun}"]
    try:
        with path.open("wb") as out:
            done = subprocess.run(
                argv, stdout=out, stderr=subprocess.PIPE, timeout=SACCT_TIMEOUT_S, check=False
            )
    except FileNotFoundError:
        hint = "run this where Slurm's commands are, or name a file that sacct printed"
        raise Failure(f"sacct is not installed here; {hint}", REFUSED) from None
    except subprocess.TimeoutExpired:
        raise Failure("sacct took longer than 10 minutes: use a later --from", REFUSED) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it gave no reason"]
        raise Failure(f"sacct: {said[-1][:200]}", REFUSED)
    return path


def _sinfo() -> str:
    import subprocess

    argv = ["sinfo", "--noheader", "--Node", "--format=%N|%G"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _write_trace(path: Path, trace: Path) -> None:
    """The columns that `shoal sim` reads, without steps and without attempts that were repeated:
    a replay runs each job once, for as long as its last attempt took."""
    import csv

    from shoal.sim.accounting import COLUMNS, is_step
    from shoal.sim.replay.readers.rows import Rows

    rows = Rows(path)
    columns = [name for name in COLUMNS.split(",") if name in rows.index]
    last = {row.text("JobID"): row for row in rows if not is_step(row)}
    try:
        with trace.open("w", encoding="utf-8", newline="") as out:
            writer = csv.writer(out, delimiter="|", lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([row.text(name) for name in columns] for row in last.values())
    except OSError as error:
        raise Failure(f"--trace: {trace}: {error.strerror}", REFUSED) from None


def _document(found: Accounts, idle_s: float | None) -> dict[str, object]:
    def sums(all_of_them: list[Sum]) -> list[dict[str, object]]:
        return [
            {
                "name": one.name,
                "jobs": one.jobs,
                "hours": round(one.time_s / 3600, 3),
                "lost_hours": round(one.lost_s / 3600, 3),
                "wait_p50_s": one.wait_s(0.5),
                "wait_p90_s": one.wait_s(0.9),
            }
            for one in all_of_them
        ]

    return {
        "unit": found.unit,
        "from_s": found.from_s,
        "to_s": found.to_s,
        "jobs": found.jobs,
        "never_ran": found.never_ran,
        "hours": round(found.time_s / 3600, 3),
        "idle_hours": None if idle_s is None else round(idle_s / 3600, 3),
        "outcomes": sums(found.outcomes),
        "accounts": sums(found.accounts),
        "users": sums(found.users),
    }


def _print_site(found: Accounts, gpus: int | None, idle_s: float | None) -> None:
    from shoal.cli.screen import show
    from shoal.cli.screen.show import Column
    from shoal.model.resources import plural

    began, ended = moment_text(found.from_s * 1000), moment_text(found.to_s * 1000)
    what = f"{plural(found.jobs, 'job')}, {found.never_ran} of them never ran"
    show.line(f"{began} to {ended}: {_hours(found.time_s)} {found.unit}-hours, {what}", "bold")
    if not found.outcomes:
        return
    total = found.time_s + (idle_s or 0.0)
    rows = [[one.name, str(one.jobs), *_shares(one.time_s, total)] for one in found.outcomes]
    if idle_s is not None:
        rows.append([f"idle, of {gpus} GPUs", "", *_shares(idle_s, total)])
    hours = Column(f"{found.unit}-hours", right=True)
    share = Column("share", right=True)
    show.line("")
    show.table([Column("outcome"), Column("runs", right=True), hours, share], rows)
    waits = [Column("wait p50", right=True), Column("wait p90", right=True)]
    for title, sums in (("account", found.accounts), ("user", found.users)):
        show.line("")
        columns = [Column(title), Column("runs", right=True), hours, share]
        lost = Column("did not end well", right=True)
        show.table([*columns, lost, *waits], [_row(one, found.time_s) for one in sums[:SHOWN]])
        if len(sums) > SHOWN:
            show.note(f"and {len(sums) - SHOWN} more: see --json")


def _row(one: Sum, total_s: float) -> list[str]:
    from shoal.sim.replay.metrics import time_text

    lost = f"{100 * one.lost_s / one.time_s:.0f} %" if one.time_s else "-"
    waits = [time_text(one.wait_s(share)) for share in (0.5, 0.9)]
    return [one.name, str(one.jobs), *_shares(one.time_s, total_s), lost, *waits]


def _shares(time_s: float, total_s: float) -> list[str]:
    return [_hours(time_s), f"{100 * time_s / total_s:.1f} %" if total_s else "-"]


def _hours(time_s: float) -> str:
    return f"{time_s / 3600:,.1f}"
