"""`shoal import`: read what another system has recorded, and change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.command import Argument, Option, number, verb
from shoal.forms.failure import REFUSED, USAGE, Failure

if TYPE_CHECKING:
    from shoal.sim.accounting import Accounts, Sum

SHOWN = 20  # accounts and users
SINCE = "30d"
SACCT_TIMEOUT_S = 600.0
STDIN = "-"


@verb(
    Argument("source", "sacct", "Slurm's accounting; there is no other yet."),
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
        raise Failure(f"there is no 'shoal import {source[:40]}': use shoal import sacct", USAGE)
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
    _print(found, gpus, idle)
    if trace is not None:
        show.note(f"wrote {trace}: shoal sim {trace} --nodes N --gpus G --policy fair")


def _input(file: str | None, since: str, folder: Path) -> Path:
    import subprocess
    import sys
    import time

    from shoal.cli.verbs.report import moment_ms
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


def _print(found: Accounts, gpus: int | None, idle_s: float | None) -> None:
    from shoal.cli.screen import show
    from shoal.cli.screen.show import Column
    from shoal.cli.verbs.report import moment_text
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
